"""The mathematics of paged_attention's reference, in float64: identities, limits, other formulas, golden numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import kvbackend
from kvbackend.ops import merge_attn_states, paged_attention
from kvbackend.ops._math import rotate
from tests.golden import wave


class Case:
    """A random batch in float64, its keys and values also as plain lists of rows."""

    def __init__(
        self, q_lens: list[int], seq_lens: list[int], heads: int = 4, kv_heads: int = 2, block_size: int = 3
    ) -> None:
        generator = torch.Generator().manual_seed(sum(q_lens) * 31 + sum(seq_lens))

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.keys = [draw(length, kv_heads, 8) for length in seq_lens]
        self.values = [draw(length, kv_heads, 6) for length in seq_lens]
        self.q = draw(sum(q_lens), heads, 8)
        self.q_lens, self.seq_lens, self.block_size = q_lens, seq_lens, block_size

    def arguments(self, order: torch.Tensor | None = None, **other: Any) -> dict[str, Any]:
        """The call, with the pages of the pool in the given order."""
        pages = [-(-length // self.block_size) for length in self.seq_lens]
        total = sum(pages) + 2
        order = torch.arange(total) if order is None else order
        kv_heads = self.keys[0].shape[1] if self.keys else 2
        key_cache = torch.full((total, self.block_size, kv_heads, 8), torch.nan, dtype=torch.float64)
        value_cache = torch.full((total, self.block_size, kv_heads, 6), torch.nan, dtype=torch.float64)
        table = torch.full((len(pages), max([*pages, 1])), 10**6, dtype=torch.int32)
        used = 0
        for b, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for i in range(pages[b]):
                block = int(order[used])
                used += 1
                table[b, i] = block
                rows = slice(i * self.block_size, min((i + 1) * self.block_size, len(keys)))
                key_cache[block, : rows.stop - rows.start] = keys[rows]
                value_cache[block, : rows.stop - rows.start] = values[rows]
        cumulated = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        call = dict(
            q=self.q, key_cache=key_cache, value_cache=value_cache, block_table=table,
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32), cu_seqlens_q=cumulated,
            max_seqlen_q=max([*self.q_lens, 0]), softmax_scale=0.3, return_lse=True,
        )  # fmt: skip
        return call | other

    def run(self, **other: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(**self.arguments(**other))

    def oracle(
        self, causal: bool = True, window: int = -1, softcap: float = 0.0, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One query and head at a time, as the definition reads."""
        outs, lses, token = [], [], 0
        for b, (n, length) in enumerate(zip(self.q_lens, self.seq_lens, strict=True)):
            for i in range(n):
                position = length - n + i
                for head in range(self.q.shape[1]):
                    kv = head // (self.q.shape[1] // self.keys[b].shape[1])
                    visible = [
                        j
                        for j in range(length)
                        if position >= 0 and (not causal or j <= position) and (window < 0 or j > position - window)
                    ]
                    s = self.keys[b][visible, kv] @ self.q[token, head] * 0.3
                    if softcap:
                        s = softcap * torch.tanh(s / softcap)
                    mass = s.exp().sum() + (0 if sinks is None else sinks[head].exp())
                    outs.append((s.exp() / mass) @ self.values[b][visible, kv] if visible else torch.zeros(6).double())
                    lses.append(s.exp().sum().log())
                token += 1
        shape = token, self.q.shape[1]
        return torch.stack(outs).view(*shape, 6), torch.stack(lses).view(shape)


def reference(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = paged_attention.reference(**paged_attention.bind((), arguments))
    return out, lse


MIXED = [1, 5, 0, 2, 3], [8, 5, 3, 2, 9]


@pytest.mark.parametrize(
    "options",
    [
        {}, dict(causal=False), dict(window=3), dict(window=1), dict(causal=False, window=4), dict(softcap=0.7),
        dict(sinks=torch.tensor([0.3, -2.0, 4.0, -torch.inf]).double()),
        dict(window=2, softcap=1.5, sinks=torch.tensor([0.1, 0.2, 0.3, 0.4]).double()),
    ],
    ids=str,
)  # fmt: skip
def test_equals_the_definition(options: dict[str, Any]) -> None:
    case = Case(*MIXED)
    out, lse = case.run(**options)
    want, want_lse = case.oracle(**options)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)  # lse is float32 by contract


def test_equals_torch_sdpa() -> None:
    case = Case([7], [7])
    q, k, v = (x.transpose(0, 1) for x in (case.q, case.keys[0], case.values[0]))
    want = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(case.run()[0], want, rtol=1e-12, atol=1e-12)


def test_causal_edit_of_a_suffix_never_changes_a_prefix() -> None:
    case = Case([6], [6])
    before = case.run()[0]
    case.keys[0][4:] += 3
    case.values[0][4:] = 100
    after = case.run()[0]
    assert torch.equal(after[:4], before[:4])
    assert not torch.allclose(after[4:], before[4:])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 5))
def test_chunks_equal_the_whole(length: int, chunks: list[int], block_size: int) -> None:
    whole = Case([length], [length], block_size=block_size)
    want = whole.run()[0]
    done = 0
    for chunk in chunks:
        n = min(chunk, length - done)
        part = Case([n], [done + n], block_size=block_size)
        part.keys, part.values = [whole.keys[0][: done + n]], [whole.values[0][: done + n]]
        part.q = whole.q[done : done + n]
        torch.testing.assert_close(part.run()[0], want[done : done + n], rtol=1e-12, atol=1e-12)
        done += n


def test_order_of_pages_does_not_matter() -> None:
    case = Case(*MIXED)
    pages = sum(-(-length // 3) for length in case.seq_lens) + 2
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    assert torch.equal(case.run(order=order)[0], case.run()[0])


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    case = Case([1, 1], [9, 7])
    out, lse = case.run()
    first, second = Case([1, 1], [4, 5]), Case([1, 1], [5, 2])
    for part, rows in ((first, [slice(0, 4), slice(0, 5)]), (second, [slice(4, 9), slice(5, 7)])):
        part.q = case.q
        part.keys = [keys[r] for keys, r in zip(case.keys, rows, strict=True)]
        part.values = [values[r] for values, r in zip(case.values, rows, strict=True)]
    parts = [part.run(causal=False) for part in (first, second)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    merged, merged_lse = merge_attn_states.reference(outs, lses)
    torch.testing.assert_close(merged, out, rtol=1e-6, atol=1e-6)  # through float32 lse
    torch.testing.assert_close(merged_lse, lse, rtol=1e-6, atol=1e-6)


def test_gqa_equals_mha_with_repeated_heads() -> None:
    case = Case([3, 1], [6, 4])
    want = case.run()[0]
    case.keys = [keys.repeat_interleave(2, 1) for keys in case.keys]
    case.values = [values.repeat_interleave(2, 1) for values in case.values]
    torch.testing.assert_close(case.run()[0], want, rtol=1e-12, atol=1e-12)


def test_limits() -> None:
    case = Case(*MIXED)
    plain, lse = case.run()
    torch.testing.assert_close(case.run(window=9)[0], plain)
    torch.testing.assert_close(case.run(softcap=1e9)[0], plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(case.run(sinks=torch.full((4,), -torch.inf).double())[0], plain)
    assert torch.equal(case.run(sinks=torch.full((4,), torch.inf).double())[0], torch.zeros_like(plain))
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    out, same_lse = case.run(sinks=sinks)
    assert torch.equal(same_lse, lse), "lse never includes the sink"
    torch.testing.assert_close(out, plain / (1 + (sinks - lse.double()).exp())[..., None], rtol=1e-6, atol=1e-6)


def test_nothing_to_attend_to() -> None:
    case = Case([1, 2, 1], [0, 2, 1])
    out, lse = case.run(window=1)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert bool((lse[0] == -torch.inf).all())
    assert out.isfinite().all()


def test_a_nan_in_a_real_key_is_seen() -> None:
    """Masking must not hide what is really wrong."""
    case = Case([1], [4])
    case.keys[0][2, 0] = torch.nan
    out, _ = case.run()
    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all(), "the other kv head has no NaN"


def test_golden_sink_attention() -> None:
    """Fixed numbers: two heads over rows 0, 2, 5 and 6 of a table, with sinks."""
    q, kv = wave(8.0, 2, 8), wave(9.0, 7, 8)[[0, 2, 5, 6]]
    cache = kv.view(1, 4, 1, 8)
    out, lse = reference(
        q=q[None], key_cache=cache, value_cache=cache, block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([4], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen_q=1, softmax_scale=8**-0.5, sinks=torch.tensor([0.3, -0.5], dtype=torch.float64), return_lse=True,
    )  # fmt: skip
    want = [
        [0.5458085, 0.39123634, 0.03727011, -0.33569088, -0.53756661, -0.46547087, -0.15614735, 0.23275685],
        [0.52286237, 0.57331151, 0.33157175, -0.07915395, -0.44953874, -0.59081558, -0.43098255, -0.05149875],
    ]
    torch.testing.assert_close(out[0], torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(lse[0], torch.tensor([2.12510529, 2.2103052]), rtol=0, atol=1e-6)


def test_rope_at_read_equals_rope_before_the_cache() -> None:
    case = Case([2], [7])
    angles = torch.arange(7).double()[:, None] * torch.tensor([1.0, 0.3, 0.05]).double()
    table = torch.cat((angles.cos(), angles.sin()), -1)
    got = case.run(rope_cos_sin=table)[0]
    turned = rotate(case.keys[0][..., :6], angles.cos()[:, None], angles.sin()[:, None], interleaved=False)
    case.keys[0] = torch.cat((turned, case.keys[0][..., 6:]), -1)
    torch.testing.assert_close(got, case.run()[0], rtol=1e-12, atol=1e-12)


def test_bias_of_a_summary_row_is_the_log_of_its_count() -> None:
    """A row that stands for n equal rows, with bias ln n, attends like the n rows."""
    case = Case([1], [5])
    case.keys[0][:] = torch.cat((case.keys[0][:2], case.keys[0][2:3].expand(3, -1, -1)))
    case.values[0][:] = torch.cat((case.values[0][:2], case.values[0][2:3].expand(3, -1, -1)))
    want = case.run(causal=False)[0]
    short = Case([1], [3], block_size=3)
    short.q, short.keys, short.values = case.q, [case.keys[0][:3]], [case.values[0][:3]]
    bias = torch.zeros(3, 3, 2)
    bias[0, 2] = torch.tensor(3.0).log()
    torch.testing.assert_close(short.run(causal=False, key_bias=bias)[0], want, rtol=1e-6, atol=1e-6)


def test_positions_after_eviction() -> None:
    """Dropping rows and telling the positions of the rest gives what a mask over all rows gives."""
    whole = Case([1], [8], block_size=4)
    kept = [0, 3, 6, 7]
    few = Case([1], [4], block_size=4)
    few.q, few.keys, few.values = whole.q, [whole.keys[0][kept]], [whole.values[0][kept]]
    positions = torch.tensor([kept] * 3)
    out, _ = few.run(key_positions=positions, window=5)  # the query stands at 7: sees 3, 6, 7
    few.keys, few.values, few.seq_lens = [few.keys[0][1:]], [few.values[0][1:]], [3]
    torch.testing.assert_close(out, few.run()[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.zeros(4, 16)), r"q has 2 dims.*\[T, H, D\]"),
        (dict(q=torch.zeros(4, 5, 16)), "q has 5 heads and key_cache 2"),
        (dict(q=torch.zeros(4, 4, 8)), "key_cache holds rows of 16 numbers in format auto; q needs 8"),
        (dict(q=torch.zeros(4, 4, 16, dtype=torch.bfloat16)), "key_cache is torch.float32 but q is torch.bfloat16"),
        (dict(q=torch.zeros(4, 4, 16, dtype=torch.int8)), "q is torch.int8; it must be torch.float32"),
        (dict(q=torch.zeros(4, 4, 16, device="meta")), "key_cache is on cpu but q is on meta"),
        (dict(seq_lens=torch.ones(2, dtype=torch.int64)), "seq_lens is torch.int64; it must be torch.int32"),
        (dict(seq_lens=torch.ones(3, dtype=torch.int32)), "seq_lens.*has B = 3; it must be 2"),
        (dict(cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32)), "must be 3, the B of .* plus 1"),
        (dict(cu_seqlens_q=torch.tensor([1, 2, 4], dtype=torch.int32)), "cu_seqlens_q starts with 1"),
        (dict(k_scale=torch.ones(1)), "k_scale is given but kv_format 'auto' has no scale"),
        (dict(kv_format="fp9"), "kv_format is 'fp9'; it must be one of"),
        (dict(kv_format="bf16"), "key_cache is torch.float32; kv_format 'bf16' reads torch.bfloat16"),
        (dict(window=0), "window is 0"),
        (dict(softcap=-1.0), "softcap is -1.0"),
        (dict(softcap=float("inf")), "softcap is inf"),
        (dict(softcap=1e-40), "softcap is 1e-40"),
        (dict(sinks=torch.zeros(5)), "sinks.*has H = 5; it must be 4, the H of q"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wrong_calls(change: dict[str, Any], message: str, backend: str) -> None:
    good = dict(paged_attention.make_samples("cpu", torch.float32))["MHA"]
    good = good | dict(q=torch.zeros(5, 4, 16), cu_seqlens_q=torch.tensor([0, 1, 5], dtype=torch.int32))
    with kvbackend.use(backend):
        paged_attention(**good)
        with pytest.raises(kvbackend.ArgumentError, match=message):
            paged_attention(**(good | change))


def test_values_are_checked_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    good = dict(paged_attention.make_samples("cpu", torch.float32))["chunked prefill"]
    int32 = torch.int32
    for change, message in [
        (dict(seq_lens=torch.tensor([9, 10**6], dtype=int32)), "seq_lens holds length 1000000"),
        (dict(cu_seqlens_q=torch.tensor([0, 4, 2], dtype=int32)), "cu_seqlens_q falls"),
        (dict(cu_seqlens_q=torch.tensor([0, 4, 9], dtype=int32)), "cu_seqlens_q ends with 9"),
        (dict(max_seqlen_q=1), "max_seqlen_q is 1"),
        (dict(block_table=good["block_table"] + 99), "block_table holds block"),
        (dict(seq_lens=torch.tensor([9, 1], dtype=int32)), "1 more query tokens than seq_lens"),
    ]:
        with pytest.raises(kvbackend.ArgumentError, match=message):
            paged_attention(**(good | change))
