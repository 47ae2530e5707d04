"""What the CPU kernels of eviction promise beyond the contract: ties, any sizes, garbage values, no foreign memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbackend import ArgumentError, backends, native, ops, use
from kvbackend.matrix import DTYPES, TOLERANCES, copy_arguments, difference, in_float64
from kvbackend.ops import registry

from .common import assert_isa, call, run_on_isa, run_python

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


# ------------------------------------------------------------------------------------------------ accumulate_scores


def scoring(q_lens: list[int], seq_lens: list[int], dtype: torch.dtype = torch.float32, heads: int = 8,
            paged: bool = False, **other: Any) -> dict[str, Any]:  # fmt: skip
    """A call over a pool that is NaN wherever no token lies; the sums start from other sums."""
    args = call("paged_attention", q_lens, seq_lens, dtype, heads=heads)
    del args["value_cache"], args["return_lse"]
    pages = args["key_cache"].shape[:3]
    shape = pages if paged else (len(seq_lens), pages[2], max(seq_lens) + 1)
    earlier = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    return args | {"score_cache" if paged else "scores": earlier} | other


def sums_of(args: dict[str, Any]) -> Tensor:
    return args["scores"] if "scores" in args else args["score_cache"]


def run_kernel(args: dict[str, Any]) -> None:
    native.kernel(registry["accumulate_scores"])(*registry["accumulate_scores"].bind((), args).values())


def kernel_sums(args: dict[str, Any]) -> Tensor:
    """What the native kernel adds up, past the dispatcher."""
    args = copy_arguments(args)
    run_kernel(args)
    return sums_of(args)


def exact_sums(args: dict[str, Any]) -> Tensor:
    args = in_float64(registry["accumulate_scores"], args)
    reference("accumulate_scores", **args)
    return sums_of(args)


def assert_sums(args: dict[str, Any], message: str = "", factor: float = 1) -> None:
    # Sums are float32, of logits that are as exact as attention's: its kernel in AMX tiles multiplies bfloat16 exactly.
    apart = difference(kernel_sums(args), exact_sums(args))
    assert apart <= TOLERANCES[torch.float32] * factor, f"{message}: {apart}"


def check_this_isa(wanted: str) -> None:
    """Runs in a process of its own."""
    assert_isa(wanted)
    for dtype in DTYPES:
        for sample, args in registry["accumulate_scores"].make_samples("cpu", dtype):
            assert_sums(args, f"{dtype} {sample}")
        for heads in (2, 4, 12, 16, 144):  # of a kv head: 1, 2, 6, 8, 72
            many = 140 // heads + 2  # more queries than one task takes
            args = scoring([1, 3, many], [1300, 90, 140], dtype, heads=heads)
            assert_sums(args, f"{dtype} {heads} heads", factor=4)


@pytest.mark.parametrize("wanted", native.CPU_ISAS)
def test_scores_of_every_instruction_set_equal_the_reference(wanted: str) -> None:
    run_on_isa(wanted, f"from tests.cpu.test_eviction_kernels import check_this_isa; check_this_isa({wanted!r})")


@pytest.mark.parametrize(
    "options",
    [
        dict(last_queries=1), dict(last_queries=70), dict(last_queries=5, window=40), dict(softcap=5.0),
        dict(sinks=torch.linspace(-3, 4, 8)), dict(paged=True), dict(paged=True, last_queries=33),
    ],
    ids=str,
)  # fmt: skip
def test_options_hold_across_tasks(options: dict[str, Any]) -> None:
    assert_sums(scoring([1, 5, 150], [1500, 700, 640], **options), factor=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_depend_on_their_own_sequence_alone(dtype: torch.dtype, set_threads: Callable[[int], None]) -> None:
    q_lens = [1, 4, 90]
    args = scoring(q_lens, [1500, 600, 400], dtype)
    together = kernel_sums(args)
    for threads in (1, 2, 16):
        set_threads(threads)
        assert torch.equal(kernel_sums(args), together)
    for i, first in enumerate((0, 1, 5)):
        own = {key: args[key][i : i + 1] for key in ("block_table", "seq_lens", "scores")}
        own |= dict(q=args["q"][first : first + q_lens[i]], cu_seqlens_q=torch.tensor([0, q_lens[i]]).int())
        assert torch.equal(kernel_sums(args | own)[0], together[i])


def test_nan_of_a_key_or_query_stays_in_the_rows_that_see_it() -> None:
    args = scoring([1, 40], [600, 40])
    clean = kernel_sums(args)
    args["key_cache"][args["block_table"][1, 0].item(), 3] = torch.nan
    got = kernel_sums(args)
    assert got[1, :, :40].isnan().all()  # every token is seen by the last query, which sees the NaN
    assert torch.equal(got[0], clean[0])
    args = scoring([1, 40], [600, 40])
    args["q"][30, 2] = torch.nan  # query 29 of the second sequence, kv head 0
    got = kernel_sums(args)
    assert got[1, 0, :30].isnan().all()
    assert torch.equal(got[1, 0, 30:], clean[1, 0, 30:])
    assert torch.equal(got[1, 1], clean[1, 1])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("case", ["blocks", "lengths", "offsets", "few queries wanted"])
def test_garbage_values_add_within_the_tensors(case: str, paged: bool) -> None:
    args = scoring([3, 2], [70, 40], paged=paged)
    args["key_cache"] = args["key_cache"].nan_to_num(0.5)
    args |= {
        "blocks": dict(block_table=torch.full_like(args["block_table"], 1 << 30)),
        "lengths": dict(seq_lens=torch.full_like(args["seq_lens"], (1 << 31) - 1)),
        "offsets": dict(cu_seqlens_q=torch.tensor([0, 3, -7]).int()),
        "few queries wanted": dict(max_seqlen_q=1),
    }[case]
    sums = sums_of(args)
    whole = torch.full((sums.numel() + 8192,), 99.0)
    inner = whole[4096 : 4096 + sums.numel()].view(sums.shape)
    inner.copy_(sums)
    run_kernel(args | {"score_cache" if paged else "scores": inner})
    assert (whole[:4096] == 99).all()
    assert (whole[4096 + sums.numel() :] == 99).all()
    assert inner.isfinite().all()
    if case == "blocks":
        assert torch.equal(inner, sums)


def test_scores_never_hold_a_matrix_of_queries_and_keys() -> None:
    """512 queries x 4096 keys x 8 heads would be 64 MiB; what the kernel takes depends on neither."""
    code = """
import resource
from tests.cpu.test_eviction_kernels import run_kernel, scoring
small, large = scoring([2], [600]), scoring([512], [4096])
run_kernel(small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_kernel(large)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run_python(code)) * 1024 < 8 << 20
