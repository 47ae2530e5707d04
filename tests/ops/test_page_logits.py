"""The mathematics of page_logits and token_logits: one query, head and token at a time, and what bounds must hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbackend
from kvbackend.ops import page_logits, token_logits
from tests.golden import wave

KV_HEADS, GROUP, DIM = 2, 3, 8


def reference(op: Any, **arguments: Any) -> Tensor:
    return op.reference(**op.bind((), arguments))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(q_lens: list[int], seq_lens: list[int], columns: int) -> dict[str, Any]:
    """Tables without a row for padding, in reverse order."""
    return dict(
        block_table=torch.arange(len(seq_lens) * columns).flip(0).view(len(seq_lens), columns).int(),
        seq_lens=torch.tensor(seq_lens).int(), cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        max_seqlen_q=max(q_lens),
    )  # fmt: skip


def bounds_of(keys: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each page [pages, Hk, D]; the last may be open."""
    parts = keys.split(page_size)
    return torch.stack([part.amin(0) for part in parts]), torch.stack([part.amax(0) for part in parts])


def paged(rows: Tensor, table: Tensor, block_size: int) -> Tensor:
    """Rows [n, Hk, D] in the blocks of one table; NaN elsewhere."""
    pages = torch.full((int(table.max()) + 2, block_size, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
    for i, block in enumerate(table.tolist()):
        part = rows[i * block_size : (i + 1) * block_size]
        pages[block, : len(part)] = part
    return pages


def middle(position: int, page_size: int, sinks: int, recent: int) -> range:
    """Tokens that are neither first nor last, by the definition."""
    start = position
    while position - start + 1 < recent or start % page_size:  # the last ones reach back to a page's first token
        start -= 1
        if start < 0:
            return range(0)
    return range(sinks, start if recent or (position + 1) % page_size else position + 1)


CASES = [(1, 0, 1), (4, 0, 1), (4, 3, 6), (5, 5, 1), (16, 2, 3), (3, 50, 1), (4, 0, 0), (3, 2, 0)]


@pytest.mark.parametrize(("page_size", "sinks", "recent"), CASES)
def test_bounds_are_the_formula_for_each_page_of_the_middle(page_size: int, sinks: int, recent: int) -> None:
    length, count, block_size = 45, 20, 3
    keys, q = draw(0, length, KV_HEADS, DIM), draw(1, count, KV_HEADS * GROUP, DIM)
    low, high = bounds_of(keys, page_size)
    call = batch([count], [length], -(-len(low) // block_size))
    caches = {f"{name}_cache": paged(rows, call["block_table"][0], block_size)
              for name, rows in (("low", low), ("high", high))}  # fmt: skip
    got = reference(page_logits, q=q, **caches, **call, page_size=page_size, num_sinks=sinks, num_recent=recent)
    want = np.full(got.shape, -np.inf)
    for i in range(count):
        inside = middle(length - count + i, page_size, sinks, recent)
        for page in {token // page_size for token in inside}:
            for head in range(KV_HEADS):
                heads = q[i, head * GROUP : (head + 1) * GROUP]
                sums = [float(torch.maximum(one * low[page, head], one * high[page, head]).sum()) for one in heads]
                want[i, head, page] = max(sums)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("page_size", "sinks", "recent"), CASES)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_tokens_have_their_logits_and_no_bound_is_below(
    page_size: int, sinks: int, recent: int, block_size: int
) -> None:
    length, count = 45, 20
    keys, q = draw(0, length, KV_HEADS, DIM), draw(1, count, KV_HEADS * GROUP, DIM)
    call = batch([count], [length], -(-length // block_size))
    pages = -(-length // page_size)
    rule = dict(page_size=page_size, num_sinks=sinks, num_recent=recent)
    every = torch.arange(-1, pages + 2).flip(0).expand(count, KV_HEADS, -1)
    cache = paged(keys, call["block_table"][0], block_size)
    got = reference(token_logits, q=q, key_cache=cache, **call, pages=every, **rule)
    want = np.full((count, KV_HEADS, pages + 3, page_size), -np.inf)
    for i in range(count):
        for token in middle(length - count + i, page_size, sinks, recent):
            for head in range(KV_HEADS):
                heads = q[i, head * GROUP : (head + 1) * GROUP]
                column = (every[0, 0] == token // page_size).nonzero().item()
                want[i, head, column, token % page_size] = max(float(one @ keys[token, head]) for one in heads)
    np.testing.assert_allclose(got.unflatten(2, (-1, page_size)).numpy(), want, rtol=1e-5, atol=1e-5)
    low, high = (part[None] for part in bounds_of(keys, page_size))
    one = torch.zeros(1, 1, dtype=torch.int32)
    bound = reference(page_logits, q=q, low_cache=low, high_cache=high, **call | dict(block_table=one), **rule)
    best = (
        got.unflatten(2, (-1, page_size)).amax(-1)[..., 2:-1].flip(-1)
    )  # pages ascending, without those that are none
    assert (bound >= best - 1e-5).all()


GOLDEN_PAGES = [1.66625428, 1.67409879]
GOLDEN_TOKENS = [1.07036056, 1.00082284, 0.17474814, 0.29720756, 0.33942575, 1.17514705]


def test_golden() -> None:
    """Fixed numbers, computed in float64 from the definition: 1 query of 2 heads over 2 pages of 3 tokens."""
    keys, q = wave(40.0, 6, 1, 4), wave(41.0, 1, 2, 4)
    low, high = (part[None] for part in bounds_of(keys, 3))
    call = batch([1], [6], 1)
    assert_near(reference(page_logits, q=q, low_cache=low, high_cache=high, **call, page_size=3), [GOLDEN_PAGES])
    every = torch.arange(2).view(1, 1, 2)
    assert_near(reference(token_logits, q=q, key_cache=keys[None], **call, pages=every, page_size=3), [GOLDEN_TOKENS])


def assert_near(got: Tensor, want: list[list[float]]) -> None:
    torch.testing.assert_close(got[0], torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_nan_reaches_its_own_scores_only() -> None:
    keys, q = draw(0, 12, KV_HEADS, DIM), draw(1, 2, KV_HEADS * GROUP, DIM)
    keys[4, 1, 3] = torch.nan
    keys[11] = torch.nan  # recent
    call, rule = batch([2], [12], 3), dict(page_size=4, num_recent=2)
    got = reference(
        token_logits, q=q, key_cache=paged(keys, call["block_table"][0], 4), **call,
        pages=torch.arange(3).expand(2, KV_HEADS, -1), **rule,
    )  # fmt: skip
    assert got.isnan().nonzero().tolist() == [[0, 1, 4], [1, 1, 4]]
    low, high = (part[None] for part in bounds_of(keys, 4))
    call["block_table"] = torch.zeros(1, 1, dtype=torch.int32)
    got = reference(page_logits, q=q, low_cache=low, high_cache=high, **call, **rule)
    assert got.isnan().nonzero().tolist() == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (page_logits, dict(page_size=0), "page_size is 0; it must be at least 1"),
        (page_logits, dict(num_sinks=-1), "num_sinks is -1; it must be at least 0"),
        (page_logits, dict(q=torch.zeros(7, 5, 16)), "q has 5 heads and low_cache 2"),
        (
            page_logits,
            {side: torch.zeros(14, 4, 0, 16) for side in ("low_cache", "high_cache")},
            "low_cache has 0 kv heads",
        ),
        (page_logits, dict(q=torch.zeros(7, 6, 16).half()), "low_cache is torch.float32 but q is torch.float16"),
        (page_logits, dict(low_cache=torch.zeros(14, 4, 2, 8)), "low_cache.*has D = 8; it must be 16"),
        (page_logits, dict(high_cache=torch.zeros(14, 5, 2, 16)), "high_cache.*has bs = 5; it must be 4"),
        (token_logits, dict(page_size=0), "page_size is 0; it must be at least 1"),
        (token_logits, dict(page_size=2**62), f"page_size is {2**62}; it must be below 2"),
        (token_logits, dict(num_recent=-2), "num_recent is -2; it must be at least 0"),
        (token_logits, dict(pages=torch.zeros(7, 3, 4).int()), "pages.*has Hk = 3; it must be 2"),
        (token_logits, dict(pages=torch.zeros(7, 2, 4)), "pages is torch.float32"),
        (token_logits, dict(kv_format="int8"), "key_cache is torch.float32; kv_format 'int8' stores torch.int8"),
    ],
)
def test_wrong_calls(op: Any, change: dict[str, Any], message: str) -> None:
    good = dict(op.make_samples("cpu", torch.float32))["sinks and recent tokens"]
    with kvbackend.use("reference"):
        op(**good)
        with pytest.raises(kvbackend.ArgumentError, match=message):
            op(**(good | change))


@pytest.mark.parametrize(("length", "good"), [(-1, False), (0, True), (60, True), (61, False)])
def test_lengths_are_checked_in_tokens(length: int, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five blocks of four pages of three tokens each."""
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    bounds = torch.zeros(8, 4, 1, 4)
    call = dict(q=torch.zeros(0, 1, 4), low_cache=bounds, high_cache=bounds, page_size=3) | batch([0], [length], 5)
    with kvbackend.use("reference"):
        if good:
            page_logits(**call)
        else:
            with pytest.raises(kvbackend.ArgumentError, match=rf"seq_lens holds length {length}.*\[0, 61\)"):
                page_logits(**call)


def test_nothing_to_score() -> None:
    q, keys, call = draw(0, 4, KV_HEADS * GROUP, DIM), draw(1, 6, 4, KV_HEADS, DIM), batch([1, 3], [10, 8], 3)
    empty_tables, pages = call["block_table"][:, :0], torch.zeros(4, KV_HEADS, 5).int()
    for change, width in (
        (dict(q=q[:, :0]), 12), (dict(keys=keys[:, :0]), 0), (dict(block_table=empty_tables), 0),
    ):  # fmt: skip
        given: dict[str, Any] = dict(q=q, keys=keys) | call | dict(page_size=2) | change
        rows = given.pop("keys")
        bounds = reference(page_logits, low_cache=rows, high_cache=rows, **given)
        assert torch.equal(bounds, torch.full((4, KV_HEADS, width), -torch.inf))
        scores = reference(token_logits, key_cache=rows, **given, pages=pages)
        assert torch.equal(scores, torch.full((4, KV_HEADS, 10), -torch.inf))
