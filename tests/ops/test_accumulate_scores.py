"""The mathematics of accumulate_scores' reference: golden numbers, identities, and one query and head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbackend
from kvbackend.ops import accumulate_scores
from tests.golden import wave

# SnapKV and H2O on q = wave(30, 1, 12, 4), k = wave(31, 1, 12, 4), scale 1/2: computed in float64 from the definitions
SNAPKV = [0.397515, 0.253496, 0.364945, 0.232304, 0.298919, 0.213896, 0.23874, 0.223867, 0.210683]
H2O = [
    2.997371, 2.188308, 1.665019, 1.250263, 1.044847, 0.766094, 0.659767, 0.471654, 0.391042, 0.270967, 0.181963,
    0.112705,
]  # fmt: skip


def call(
    q: torch.Tensor, k: torch.Tensor, block_size: int = 5, q_len: int | None = None, **other: Any
) -> dict[str, Any]:
    """One sequence: q [n, H, D] at the end of k [T, Hk, D], its pages in reverse order."""
    length, kv_heads, dim = k.shape
    pages = -(-length // block_size)
    cache = torch.full((pages + 1, block_size, kv_heads, dim), torch.nan, dtype=k.dtype)
    order = torch.arange(pages).flip(0)
    for i, block in enumerate(order.tolist()):
        rows = k[i * block_size : (i + 1) * block_size]
        cache[block, : len(rows)] = rows
    return dict(
        q=q, key_cache=cache, block_table=order[None].int(), seq_lens=torch.tensor([length], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, len(q) if q_len is None else q_len], dtype=torch.int32), max_seqlen_q=len(q),
        softmax_scale=0.5,
    ) | other  # fmt: skip


def scores_of(*args: Any, **other: Any) -> torch.Tensor:
    arguments = call(*args, **other)
    scores = torch.zeros(1, arguments["key_cache"].shape[2], int(arguments["seq_lens"][0]))
    accumulate_scores.reference(**arguments, scores=scores)
    return scores[0]


def oracle(q: np.ndarray, k: np.ndarray, scale: float = 0.5, bias: np.ndarray | None = None) -> np.ndarray:
    """[Hk, T], one query, head and key at a time."""
    (n, heads, _), (length, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    sums = np.zeros((kv_heads, length))
    for i in range(n):
        for h in range(heads):
            seen = length - n + i + 1
            logits = [scale * float(q[i, h] @ k[j, h // group]) for j in range(seen)]
            if bias is not None:
                logits = [logit + bias[j, h // group] for j, logit in enumerate(logits)]
            top = max(logits)
            weights = [np.exp(logit - top) for logit in logits]
            for j in range(seen):
                sums[h // group, j] += weights[j] / sum(weights) / group
    return sums


GOLDEN = wave(30, 1, 12, 4).transpose(0, 1), wave(31, 1, 12, 4).transpose(0, 1)


def test_h2o_golden_numbers() -> None:
    q, k = GOLDEN
    np.testing.assert_allclose(scores_of(q, k)[0], H2O, rtol=0, atol=2e-6)


def test_snapkv_golden_numbers() -> None:
    q, k = GOLDEN
    np.testing.assert_allclose(scores_of(q, k, last_queries=3)[0, :9], SNAPKV, rtol=0, atol=2e-6)
    np.testing.assert_allclose(scores_of(q[-3:], k)[0, :9], SNAPKV, rtol=0, atol=2e-6)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 14),
    st.integers(1, 14),
    st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    st.integers(-1, 15),
)
def test_equals_one_query_and_head_at_a_time(seed: int, n: int, more: int, heads: tuple[int, int], last: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(n, heads[0], 6, generator=draw, dtype=torch.float64)
    k = torch.randn(n + more - 1, heads[1], 6, generator=draw, dtype=torch.float64)
    counted = q.numpy() if last < 0 else q.numpy()[max(n - last, 0) :]
    want = oracle(counted, k.numpy()) if len(counted) else np.zeros((heads[1], len(k)))
    np.testing.assert_allclose(scores_of(q, k, last_queries=last), want, rtol=0, atol=1e-6)


def test_the_mass_of_a_query_is_one() -> None:
    q, k = wave(1, 7, 6, 4), wave(2, 11, 3, 4)
    torch.testing.assert_close(scores_of(q, k).sum(-1), torch.full((3,), 7.0))
    # a sink takes its part: with equal logits of 0 a query at position p gives it 1 / (p + 2)
    sums = scores_of(torch.zeros_like(q), k, sinks=torch.zeros(6))
    torch.testing.assert_close(sums.sum(-1), torch.full((3,), sum(p / (p + 1) for p in range(5, 12))))


def test_chunks_of_a_prompt_add_up_to_the_whole() -> None:
    q, k = wave(3, 300, 2, 4), wave(4, 300, 1, 4)
    whole = scores_of(q, k, block_size=7)
    parts = torch.zeros(1, 1, 300)
    for start, end in [(0, 130), (130, 131), (131, 300)]:
        arguments = call(q[start:end], k[:end], block_size=7)
        accumulate_scores.reference(**arguments, scores=parts)
    torch.testing.assert_close(parts[0], whole)


def test_pages_get_what_a_dense_tensor_gets() -> None:
    q, k = wave(5, 6, 4, 4), wave(6, 12, 2, 4)
    arguments = call(q, k)
    pages = torch.full(arguments["key_cache"].shape[:3], 7.0)
    accumulate_scores.reference(**arguments, score_cache=pages)
    dense = scores_of(q, k)
    gathered = pages[arguments["block_table"][0].long()].flatten(0, 1)
    torch.testing.assert_close(gathered[:12].mT, dense + 7)
    assert (gathered[12:] == 7).all()
    assert (pages[-1] == 7).all()  # a block that no table names


def test_bias_and_positions_shape_the_softmax_as_in_attention() -> None:
    q, k = wave(7, 1, 2, 4), wave(8, 6, 1, 4)
    bias = wave(9, 6, 1).float()
    got = scores_of(q, k, block_size=6, key_bias=torch.cat((bias[None], bias[None])))
    np.testing.assert_allclose(got, oracle(q.numpy(), k.numpy(), bias=bias.double().numpy()), rtol=0, atol=1e-6)
    # positions 0 10 20 30 40 41 and a window of 12: only rows at 30, 40 and 41 are seen
    positions = torch.tensor([[0, 10, 20, 30, 40, 41]] * 2)
    seen = scores_of(q, k, block_size=6, key_positions=positions, window=12)
    np.testing.assert_allclose(seen[0, 3:], oracle(q.numpy(), k[3:].numpy())[0], rtol=0, atol=1e-6)
    assert (seen[0, :3] == 0).all()


def test_nan_in_rows_that_are_not_seen_reaches_nothing_and_in_seen_ones_shows() -> None:
    q, k = wave(10, 2, 2, 4), wave(11, 6, 1, 4)
    assert scores_of(q, k, block_size=4).isfinite().all()  # the pages are NaN elsewhere
    k[2] = torch.nan
    assert scores_of(q, k).isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "neither scores nor score_cache is given; exactly one"),
        ({"score_cache": torch.zeros(4, 5, 2)}, "scores and score_cache are given; exactly one"),
        ({"scores": torch.zeros(1, 3, 12)}, "scores .* has Hk = 3; it must be 2"),
        ({"q": torch.zeros(2, 3, 4, dtype=torch.float64)}, "q has 3 heads and key_cache 2"),
        ({"window": 0}, "window is 0; it must be -1"),
        ({"q": torch.zeros(2, 4, 4)}, "key_cache is torch.float64 but q is torch.float32"),
    ],
)
def test_bad_input_is_refused_before_any_write(change: dict[str, Any], message: str) -> None:
    arguments = call(wave(1, 2, 4, 4), wave(2, 12, 2, 4)) | {"scores": torch.zeros(1, 2, 12)} | change
    given = [arguments[name] for name in ("scores", "score_cache") if arguments.get(name) is not None]
    with kvbackend.use("reference"), pytest.raises(kvbackend.ArgumentError, match=message):
        accumulate_scores(**arguments)
    assert all((tensor == 0).all() for tensor in given)
