"""Merging against attention over all keys at once, golden numbers, and the rules for empty states."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kvbackend import ArgumentError
from kvbackend.ops import merge_attn_states

INF, NAN = torch.inf, torch.nan
EXACT = dict(rtol=1e-13, atol=1e-13)  # float64 sums of a few dozen terms
FLOAT32 = dict(rtol=1e-6, atol=1e-6)  # lse comes back in float32


def attention(logits: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention: logits [T, H, S], v [S, Dv]; no key gives NaN, as engines may leave it."""
    weights = logits.softmax(-1)
    return torch.einsum("ths,sd->thd", weights, v), logits.logsumexp(-1)


def problem(keys: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 2, keys, dtype=torch.float64, generator=generator) * 4
    return logits, torch.randn(keys, 5, dtype=torch.float64, generator=generator)


def split(logits: torch.Tensor, v: torch.Tensor, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the stretches of keys between the cuts, stacked."""
    bounds = [0, *sorted(cuts), len(v)]
    parts = [attention(logits[..., a:b], v[a:b]) for a, b in itertools.pairwise(bounds)]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


@given(keys=st.integers(1, 20), cuts=st.lists(st.integers(0, 20), max_size=3), seed=st.integers(0, 9))
def test_split_keys_give_attention_over_all(keys, cuts, seed):
    logits, v = problem(keys, seed)
    out, lse = merge_attn_states.reference(*split(logits, v, [min(cut, keys) for cut in cuts]))
    want_out, want_lse = attention(logits, v)
    assert_close(out, want_out, **EXACT)
    assert_close(lse, want_lse.float(), **FLOAT32)


def test_merging_is_associative_and_takes_any_order():
    outs, lses = split(*problem(13), [4, 5])
    at_once, _ = merge_attn_states.reference(outs, lses)
    first, first_lse = merge_attn_states.reference(outs[:2], lses[:2])
    in_turn, _ = merge_attn_states.reference(torch.stack((first, outs[2])), torch.stack((first_lse.double(), lses[2])))
    assert_close(in_turn, at_once, **FLOAT32)  # one lse went through float32
    swapped, _ = merge_attn_states.reference(outs[[2, 0, 1]], lses[[2, 0, 1]])
    assert_close(swapped, at_once, **EXACT)


def test_one_part_is_itself():
    outs, lses = split(*problem(6), [])
    out, lse = merge_attn_states.reference(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0].float())


def test_sinks_are_one_more_column_of_the_softmax():
    logits, v = problem(9)
    sinks = torch.tensor([0.3, -2.0])
    column = sinks.double()[None, :, None].expand(4, -1, -1)
    weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
    outs, lses = split(logits, v, [3])
    out, lse = merge_attn_states.reference(outs, lses, sinks)
    assert_close(out, torch.einsum("ths,sd->thd", weights, v), **EXACT)
    assert_close(lse, logits.logsumexp(-1).float(), **FLOAT32)


def test_sinks_at_infinity():
    outs, lses = split(*problem(9), [3])
    plain, plain_lse = merge_attn_states.reference(outs, lses)
    out, lse = merge_attn_states.reference(outs, lses, torch.tensor([-INF, INF]))
    assert torch.equal(out[:, 0], plain[:, 0])
    assert not out[:, 1].any()
    assert torch.equal(lse, plain_lse)


def test_golden_sink_attention():
    def wave(seed: float, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.sin(seed + 0.73 * torch.arange(count, dtype=torch.float64)).reshape(shape)

    q, kv = wave(8, 2, 8), wave(9, 7, 8)[[0, 2, 5, 6]]
    logits = (q @ kv.T * 8**-0.5)[None]  # [1, H, S]
    golden = [
        [0.5458085, 0.39123634, 0.03727011, -0.33569088, -0.53756661, -0.46547087, -0.15614735, 0.23275685],
        [0.52286237, 0.57331151, 0.33157175, -0.07915395, -0.44953874, -0.59081558, -0.43098255, -0.05149875],
    ]
    for cuts in ([], [1], [2, 3]):
        out, lse = merge_attn_states.reference(*split(logits, kv, cuts), torch.tensor([0.3, -0.5]))
        assert_close(out[0], torch.tensor(golden, dtype=torch.float64), rtol=0, atol=2e-8)  # sinks are float32
        assert_close(lse[0], torch.tensor([2.12510529, 2.2103052]), rtol=0, atol=3e-7)


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("mark", [-INF, INF])
@pytest.mark.parametrize("junk", [NAN, INF, 7.0])
def test_empty_state_is_the_identity(others, mark, junk):
    outs, lses = split(*problem(8), [3] if others == 2 else [])
    want = merge_attn_states.reference(outs, lses)
    for place in range(others + 1):
        with_empty = [
            torch.cat((part[:place], torch.full_like(part[:1], fill), part[place:]))
            for part, fill in ((outs, junk), (lses, mark))
        ]
        got = merge_attn_states.reference(*with_empty)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("marks", [(-INF,), (INF,), (-INF, -INF), (INF, -INF), (INF, INF), (-INF, INF, -INF)])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -INF])])
def test_nothing_but_empty_states(marks, sinks):
    lses = torch.tensor(marks)[:, None, None].expand(-1, 1, 2)
    out, lse = merge_attn_states.reference(torch.full((len(marks), 1, 2, 3), NAN), lses, sinks)
    assert torch.equal(out, torch.zeros(1, 2, 3))
    assert torch.equal(lse, torch.full((1, 2), -INF))


def test_nan_is_not_hidden_and_stays_in_its_row():
    outs, lses = split(*problem(8), [3])
    clean = merge_attn_states.reference(outs, lses)
    lses[1, 2, 0] = NAN
    outs[0, 1, 1, 4] = NAN
    out, lse = merge_attn_states.reference(outs, lses)
    assert out[2, 0].isnan().all()
    assert lse[2, 0].isnan()
    assert out[1, 1, 4].isnan()
    for got, want in zip((out, lse), clean, strict=True):
        assert torch.equal(got[[0, 3]], want[[0, 3]])
    assert torch.equal(out[1, 1, :4], clean[0][1, 1, :4])


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_large_lse_neither_overflows_nor_underflows(shift):
    outs, lses = split(*problem(8), [3])
    out, lse = merge_attn_states.reference(outs, lses + shift)
    want, want_lse = merge_attn_states.reference(outs, lses)
    assert_close(out, want, rtol=1e-10, atol=1e-10)  # lse + shift loses 4 digits
    assert_close(lse, want_lse + shift, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_float32_and_rounded_once(dtype):
    outs, lses = split(*problem(8), [3])
    outs, lses = outs.to(dtype), lses.float()
    out, lse = merge_attn_states.reference(outs, lses)
    want, want_lse = merge_attn_states.reference(outs.float(), lses)
    assert out.dtype == dtype
    assert torch.equal(out, want.to(dtype))
    assert torch.equal(lse, want_lse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(outs=torch.zeros(0, 3, 4, 5), lses=torch.zeros(0, 3, 4)), "outs has no partial result"),
        (dict(lses=torch.zeros(2, 3, 5)), "lses .*has H = 5; it must be 4, the H of outs"),
        (dict(lses=torch.zeros(3, 3, 4)), "lses .*has N = 3; it must be 2"),
        (dict(lses=torch.zeros(2, 3, 4, dtype=torch.float16)), "lses is torch.float16; it must be torch.float32"),
        (dict(sinks=torch.zeros(3)), r"sinks \[H\] has H = 3; it must be 4"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match=message):
        merge_attn_states(**dict(outs=torch.zeros(2, 3, 4, 5), lses=torch.zeros(2, 3, 4)) | change)
