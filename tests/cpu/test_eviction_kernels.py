"""What the CPU kernels of eviction promise beyond the contract: ties, any sizes, garbage values, no foreign memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbackend import ArgumentError, backends, ops, use
from kvbackend.matrix import DTYPES
from kvbackend.ops import registry

pytestmark = pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)

FAR = (1 << 62, -(1 << 63), (1 << 63) - 1, 1 << 31, -(1 << 31))


@pytest.fixture(autouse=True)
def _only_the_cpu_kernels():
    with use("cpu"):
        yield


def reference(name: str, **args: Any) -> Any:
    return registry[name].reference(**registry[name].bind((), args))


# ---------------------------------------------------------------------------------------------------- select_tokens


@pytest.mark.parametrize(("pooling", "kernel"), [("none", 1), ("avg", 5), ("avg", 401), ("max", 3), ("max", 401)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("distinct", [3, 40, 1 << 20])
def test_selection_equals_the_reference(distinct: int, dtype: torch.dtype, pooling: str, kernel: int) -> None:
    """Few distinct scores tie nearly everywhere; NaN and infinities among them."""
    generator = torch.Generator().manual_seed(distinct + kernel)
    scores = (torch.randint(distinct, (6, 3, 333), generator=generator) - distinct // 2).to(dtype) / 8
    special = torch.rand(scores.shape, generator=generator)
    scores[special < 0.02] = torch.nan
    scores[(special > 0.97) & (special < 0.98)] = -torch.inf
    scores[special > 0.995] = torch.inf
    args = dict(scores=scores, seq_lens=torch.tensor([333, 332, 100, 7, 1, 0]).int(), pooling=pooling, kernel=kernel)
    for budget, sinks, recent in ((1, 0, 0), (8, 4, 4), (40, 4, 8), (99, 0, 17), (333, 1, 1), (400, 0, 0)):
        sizes = dict(budget=budget, num_sinks=sinks, num_recent=recent)
        assert torch.equal(ops.select_tokens(**args, **sizes), reference("select_tokens", **args, **sizes)), sizes
    budgets = torch.tensor([40, 12, 30, 13, 40, 20]).int()
    sizes = dict(budget=40, num_sinks=4, num_recent=8, budgets=budgets)
    assert torch.equal(ops.select_tokens(**args, **sizes), reference("select_tokens", **args, **sizes))


def test_sums_that_overflow_are_ranked_as_the_reference_does() -> None:
    largest = torch.finfo(torch.float32).max
    scores = torch.tensor([1.0, -largest, -largest, torch.inf, -largest, 2.0, largest, largest, 0.0, -1.0])[None, None]
    for budget in range(1, 11):
        for sinks in (0, 1):
            args = dict(
                scores=scores, seq_lens=torch.tensor([10]).int(), budget=budget, num_sinks=sinks, pooling="avg",
                kernel=3,
            )  # fmt: skip
            assert torch.equal(ops.select_tokens(**args), reference("select_tokens", **args)), (budget, sinks)


@pytest.mark.parametrize("length", [-1, -(1 << 31), 11, (1 << 31) - 1])
def test_lengths_outside_the_scores_select_columns_of_the_scores(length: int) -> None:
    args = dict(scores=torch.randn(2, 2, 10), seq_lens=torch.tensor([length, 3]).int(), budget=6, num_recent=2)
    got = ops.select_tokens(**args)
    assert torch.equal(got, reference("select_tokens", **args))
    assert (got >= -1).all()
    assert (got < 10).all()


def test_sizes_are_refused_as_by_the_op() -> None:
    args = dict(scores=torch.randn(1, 1, 10), seq_lens=torch.tensor([10]).int())
    for wrong in (dict(budget=3, num_sinks=2, num_recent=2), dict(budget=3, kernel=2), dict(budget=3, num_recent=-1)):
        with pytest.raises(ArgumentError) as told:
            ops.select_tokens(**args, **wrong)
        with use("reference"), pytest.raises(ArgumentError) as wanted:
            ops.select_tokens(**args, **wrong)
        assert str(told.value) == str(wanted.value)


# ---------------------------------------------------------------------------------------------------- compact_cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int64], ids=str)
@pytest.mark.parametrize("sets", [1, 3])
def test_compaction_equals_the_reference(sets: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    integers = torch.randint(0, 256, (40, 4, 3, 5 * dtype.itemsize), generator=generator).to(torch.uint8)
    cache = integers.view(dtype).transpose(1, 2).contiguous().transpose(1, 2)  # heads before slots in memory
    table = torch.randperm(40, generator=generator)[:36].view(2, 18)
    kept = torch.full((2, sets, 50), -1)
    for b in range(2):
        for s in range(sets):
            count = 30 + 7 * s
            kept[b, s, :count] = torch.randperm(72, generator=generator)[:count].sort().values
    wanted = cache.clone()
    reference("compact_cache", cache=wanted, block_table=table, kept=kept)
    ops.compact_cache(cache, table, kept)
    assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


def test_rows_from_or_to_blocks_outside_the_cache_stay() -> None:
    whole = torch.arange(15 * 4 * 2).view(15, 4, 2)
    before, cache = whole.clone(), whole[5:10]
    around = torch.tensor([-1, -5, 5, 6, *FAR])
    table = torch.stack((around, torch.full_like(around, 2)), 1)
    inside = torch.stack((torch.full_like(around, 2), around), 1)
    for rows in (table, inside):  # targets that do not exist, then sources that do not
        ops.compact_cache(cache, rows, torch.tensor([[[4, 5, 6]]]).expand(len(around), 1, 3))
        assert torch.equal(whole, before)
    ops.compact_cache(cache, torch.tensor([[0, 1]]), torch.tensor([[[3, 8, (1 << 62), -7]]]))
    assert torch.equal(cache[0, 0], before[5, 3])
    assert torch.equal(whole[5:, 1:], before[5:, 1:])
