"""The CPU kernels that select and attend to chosen tokens: each instruction set, memory, what a row may depend on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbackend import formats, native
from kvbackend.codecs import pack_record
from kvbackend.matrix import DTYPES, TOLERANCES, difference, run_cell
from kvbackend.ops import registry

from .common import assert_equal, assert_isa, check_batch_mates, check_threads, run_on_isa, run_python
from .test_attention_kernels import guarded

INDEXERS = ("indexer_logits", "lightning_indexer", "candidate_blocks")
NAMES = ("topk_indices", *INDEXERS, "sparse_mla_attention")
MORE: dict[str, dict[str, Any]] = {
    "indexer_logits": {}, "lightning_indexer": dict(k=200), "candidate_blocks": dict(num_candidates=30)
}  # fmt: skip
EVERY_INDEXER = pytest.mark.parametrize("name", INDEXERS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
PAGED = pytest.mark.parametrize("name", [*INDEXERS, "sparse_mla_attention"])
KV_FORMATS = ("auto", "index_fp8_132", "index_mxfp4_68", "index_int8_130")


def kernel(name: str, **args: Any) -> tuple[Tensor, ...]:
    """The native kernel itself, past the dispatcher."""
    assert native.library("cpu").reason is None
    result = native.kernel(registry[name])(*registry[name].bind((), args).values())
    return result if isinstance(result, tuple) else (result,)


def call(
    name: str, q_lens: list[int], seq_lens: list[int], dtype: torch.dtype = torch.float32, heads: int = 32,
    block_size: int = 16, kv_format: str = "auto", topk: int = 300, **other: Any,
) -> dict[str, Any]:  # fmt: skip
    """A call over a pool that is NaN wherever no token lies."""
    generator = torch.Generator().manual_seed(7)
    width = 128 if name in INDEXERS else 576
    columns = max(1, *(-(-length // block_size) for length in seq_lens))
    num_blocks = len(seq_lens) * columns + 1
    table = torch.randperm(num_blocks, generator=generator)[: len(seq_lens) * columns].view(len(seq_lens), columns)
    pool = torch.full((num_blocks, block_size, width), torch.nan, dtype=dtype)
    for blocks, length in zip(table, seq_lens, strict=True):
        index = torch.arange(length)
        pool[blocks[index // block_size], index % block_size] = torch.randn(length, width, generator=generator).to(
            dtype
        )
    tokens = sum(q_lens)
    batch = dict(
        block_table=table.int(), seq_lens=torch.tensor(seq_lens).int(), max_seqlen_q=max(q_lens),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
    )  # fmt: skip
    pages = pool if kv_format == "auto" else pack_record(pool.nan_to_num(3.0), kv_format)
    q = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    if name in INDEXERS:
        weights = torch.randn(tokens, heads, generator=generator)
        return dict(q=q, weights=weights, key_cache=pages, kv_format=kv_format, **batch, **MORE[name]) | other
    caches = dict(ckv_cache=pages, kpe_cache=None, kv_format=kv_format)
    if kv_format == "auto":
        caches = dict(ckv_cache=pool[..., :512], kpe_cache=pool[..., 512:])
    seen = [length - n + i + 1 for n, length in zip(q_lens, seq_lens, strict=True) for i in range(n)]
    chosen = [torch.randperm(max(count, topk), generator=generator)[:topk] for count in seen]
    indices = torch.stack([torch.where(row < count, row, -1) for row, count in zip(chosen, seen, strict=True)]).int()
    parts = dict(q_nope=q[..., :512], q_pe=q[..., 512:], topk_indices=indices, softmax_scale=0.05, return_lse=True)
    return {**parts, **caches, **batch, **other}


# ------------------------------------------------------------------------------------------------- instruction sets


def bits_at_bounds() -> Tensor:
    """40 numbers whose upper or lower bits are all alike, or one more or less: where a search by bits ends."""
    uppers = (0x000, 0x001, 0x3F8, 0x3F9, 0x400, 0x7F7, 0x800, 0x801, 0xBF8, 0xFF7)
    bits = [upper << 20 | lower for upper in uppers for lower in (0, 1, 0xFFFFE, 0xFFFFF)]
    return torch.tensor(bits).int().view(torch.float32)


def check_this_isa(wanted: str) -> None:
    """Everything that depends on the instruction set; runs in a process of its own."""
    assert_isa(wanted)
    for name in NAMES:
        for dtype in DTYPES:
            for sample, args in registry[name].make_samples("cpu", dtype):
                cell = run_cell(registry[name], "cpu", "cpu", dtype, sample, args)
                refused = sample == "v32_nvfp4_352" or sample.startswith("fp8 queries")
                assert cell.status == ("refused" if refused else "pass"), f"{name} {dtype} {sample}: {cell}"
    generator = torch.Generator().manual_seed(3)
    ties = torch.randint(-5000, 5000, (3, 40000), generator=generator).float()
    for scores in (ties, bits_at_bounds()[torch.randint(40, (3, 3000), generator=generator)]):
        for k in (1, 7, 512, 2048, 2990, 30000):
            for order in ("score", "position"):
                want = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
                want = want if order == "score" else want.sort(dim=1).values
                got = kernel("topk_indices", scores=scores, k=k, order=order)[0].long()[:, : scores.shape[1]]
                assert torch.equal(got, want), (k, order)
    for dtype in DTYPES:
        for heads in (1, 16, 40, 64):
            for kv_format in KV_FORMATS:
                args = call("indexer_logits", [1, 6], [700, 90], dtype, heads, kv_format=kv_format)
                cell = run_cell(registry["indexer_logits"], "cpu", "cpu", dtype, f"{heads} {kv_format}", args)
                assert cell.status == "pass", cell
        for heads in (1, 3, 16, 72):
            for kv_format in ("auto", "v32_fp8_656", "v32_fp8_656_ascend"):
                args = call("sparse_mla_attention", [1, 3], [900, 90], dtype, heads, kv_format=kv_format)
                cell = run_cell(registry["sparse_mla_attention"], "cpu", "cpu", dtype, f"{heads} {kv_format}", args)
                assert cell.status == "pass", cell


@pytest.mark.parametrize("wanted", native.CPU_ISAS)
def test_every_instruction_set_equals_the_reference(wanted: str) -> None:
    run_on_isa(wanted, f"from tests.cpu.test_sparse_kernels import check_this_isa; check_this_isa({wanted!r})")


# ---------------------------------------------------------------------------------------- what a row may depend on


@PAGED
@EVERY_DTYPE
def test_the_number_of_threads_changes_no_bit(
    name: str, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    check_threads(partial(kernel, name), set_threads, **call(name, [1, 5, 30], [3000, 700, 200], dtype))


@PAGED
@EVERY_DTYPE
def test_batch_mates_change_no_bit(name: str, dtype: torch.dtype) -> None:
    q_lens = [1, 4, 17, 1]
    check_batch_mates(partial(kernel, name), q_lens, **call(name, q_lens, [1500, 600, 400, 1], dtype))


@EVERY_INDEXER
@EVERY_DTYPE
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_fused_selection_sees_the_scores_of_the_matrix(name: str, dtype: torch.dtype, kv_format: str) -> None:
    """However keys are cut into tiles, ranges and candidates, a score has the same bits."""
    args = call("indexer_logits", [1, 6, 1], [2100, 90, 513], dtype, kv_format=kv_format)
    scores = kernel("indexer_logits", **args)[0]
    if name == "indexer_logits":  # key by key: each in a tile of its own
        first = args["block_table"][2, 32:33].long()
        one = {"q": args["q"][7:], "weights": args["weights"][7:], "block_table": first[None].int(), "max_seqlen_q": 1}
        one |= {"seq_lens": torch.tensor([1]).int(), "cu_seqlens_q": torch.tensor([0, 1]).int()}
        assert kernel(name, **args | one)[0][0, 0] == scores[7, 512]
        return
    if name == "lightning_indexer":
        for k in (1, 65, 2000):
            want = kernel("topk_indices", scores=scores, k=k, order="position")
            assert_equal(kernel(name, **args, k=k), want)
        candidates = torch.arange(264).flip(0).expand(8, -1).int()  # all, in another order
        assert_equal(kernel(name, **args, k=65, candidates=candidates), kernel(name, **args, k=65))
        return
    count = -(-scores.shape[1] // 8)
    highest = (
        torch.nn.functional.pad(scores, (0, count * 8 - scores.shape[1]), value=-torch.inf).view(8, count, 8).amax(-1)
    )
    for row, seen in enumerate([2100, 85, 86, 87, 88, 89, 90, 513]):
        highest[row, (seen - 1) // 8] = torch.inf
    want = kernel("topk_indices", scores=highest, k=30, order="position")
    assert_equal(kernel(name, **args, num_candidates=30), want)


@EVERY_INDEXER
@pytest.mark.parametrize("heads", [1, 32, 48, 64, 80])
def test_where_keys_lie_changes_no_bit(name: str, heads: int) -> None:
    """Keys that follow each other in a block are multiplied where they lie, others are copied first."""
    args = call(name, [2, 5, 1], [333, 90, 16], torch.bfloat16, heads, block_size=48, **MORE[name])
    keys = args["key_cache"]
    apart = keys.new_empty(*keys.shape, 2)[..., 0].copy_(keys)
    assert_equal(kernel(name, **args), kernel(name, **args | dict(key_cache=apart)))


@EVERY_INDEXER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_without_heads_every_key_scores_0(name: str, dtype: torch.dtype) -> None:
    kernel(name, **call(name, [2, 3], [200, 90], dtype, heads=64))  # whose scores its buffers then hold
    args = call(name, [2, 3], [200, 90], dtype, heads=0)
    want = registry[name].reference(**registry[name].bind((), args))
    assert_equal(kernel(name, **args), want if isinstance(want, tuple) else (want,))


def test_memory_of_the_kernel_does_not_grow_with_queries_times_context() -> None:
    """64 queries over 32k keys: beside the result, less than 1/20 of the score matrix is ever held."""
    code = """if True:
        import torch
        from kvbackend.ops import registry, lightning_indexer
        from kvbackend import use
        from tests.cpu.test_sparse_kernels import call, kernel
        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        args = call("lightning_indexer", [64], [32768], torch.bfloat16, heads=64, block_size=64, k=512)
        kernel("lightning_indexer", **args | dict(seq_lens=torch.tensor([64]).int()))  # all is loaded
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = peak()
        kernel("lightning_indexer", **args)
        print(peak() - before)
    """
    result, matrix = 64 * 512 * 4, 64 * 32768 * 4
    assert int(run_python(code)) - result < matrix / 20


# ------------------------------------------------------------------------------------------------- values gone wrong

GARBAGE: dict[str, dict[str, Any]] = {
    "block ids past the pool": dict(block_table=2**30),
    "largest block ids": dict(block_table=2**31 - 1),
    "negative block ids": dict(block_table=-(2**31)),
    "lengths past the table": dict(seq_lens=2**31 - 1),
    "negative lengths": dict(seq_lens=-5),
    "offsets past the queries": dict(cu_seqlens_q=[0, 2**31 - 1, 2**31 - 1]),
    "falling offsets": dict(cu_seqlens_q=[0, 3, -7]),
    "most negative offsets": dict(cu_seqlens_q=[0, -(2**31), 2**31 - 1]),
    "more queries than tokens": dict(seq_lens=1),
    "max_seqlen_q of 0": dict(max_seqlen_q=0),
    "negative max_seqlen_q": dict(max_seqlen_q=-1),
    "positions past the table": dict(topk_indices=2**31 - 1),
    "negative positions": dict(topk_indices=-(2**31)),
    "candidates past the table": dict(candidates=2**31 - 1),
    "negative candidates": dict(candidates=-(2**31)),
}


@PAGED
@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_values_stay_within_the_tensors(name: str, case: str) -> None:
    args = call(name, [3, 2], [70, 40], heads=4, topk=50)
    if name == "lightning_indexer" and "candidates" in case:
        args["candidates"] = torch.zeros(5, 7, dtype=torch.int32)
    for key, value in GARBAGE[case].items():
        if key not in args:
            pytest.skip(f"{name} has no {key}")
        if torch.is_tensor(args[key]):
            args[key] = torch.tensor(value).int().expand(args[key].shape).clone()
        else:
            args[key] = value
    wholes = {}
    for key, value in args.items():
        if torch.is_tensor(value):
            args[key], wholes[key] = guarded(value.nan_to_num(0.5) if value.is_floating_point() else value)
    before = {key: whole.clone() for key, whole in wholes.items()}
    results = kernel(name, **args)
    for key, whole in wholes.items():
        assert torch.equal(whole.nan_to_num(7.0), before[key].nan_to_num(7.0)), f"{key} was written"
    assert not any(result.isnan().any() for result in results if result.is_floating_point())  # no row from outside
    nothing = {"lightning_indexer": -1, "candidate_blocks": -1, "indexer_logits": -torch.inf, "sparse_mla_attention": 0}
    if ("block ids" in case and name != "candidate_blocks") or "positions" in case or "candidates" in case:
        assert (results[0] == nothing[name]).all()
    if case == "lengths past the table":
        full = args | {"seq_lens": torch.full_like(args["seq_lens"], args["block_table"].shape[1] * 16)}
        assert_equal(results, kernel(name, **full))


# ------------------------------------------------------------------------------------------------- strides, addresses


@PAGED
@pytest.mark.parametrize("records", [False, True], ids=["split", "records"])
def test_offsets_past_two_to_the_31_elements(name: str, records: bool) -> None:
    """Blocks lie so far apart that stride times id passes 2^31; only the pages in use are ever backed by memory."""
    kv_format = "auto" if not records else "index_mxfp4_68" if name in INDEXERS else "v32_fp8_656"
    args = call(name, [1, 2], [40, 33], heads=4, topk=20, kv_format=kv_format)
    apart = (1 << 31) // 6 + 64
    far = dict(args)
    for key in [key for key in args if key.endswith("_cache") and args[key] is not None]:
        cache = args[key]
        virtual = torch.empty(cache.shape[0] * apart, dtype=cache.dtype)
        far[key] = virtual.as_strided(cache.shape, (apart, *cache.contiguous().stride()[1:]))
        far[key].copy_(cache)
    assert int(args["block_table"].max()) * apart > 1 << 31
    assert_equal(kernel(name, **far), kernel(name, **args))


@PAGED
@EVERY_DTYPE
def test_any_strides(name: str, dtype: torch.dtype) -> None:
    args = call(name, [1, 2], [40, 33], dtype, heads=4, topk=20)
    strided = dict(args)
    for key, value in args.items():
        if torch.is_tensor(value):  # the last dim first in memory, and every second element only
            last_first = value.movedim(-1, 0).contiguous().movedim(0, -1)
            strided[key] = torch.stack((last_first, last_first), -1)[..., 0]
    assert not strided["block_table"].is_contiguous()
    assert_equal(kernel(name, **strided), kernel(name, **args))


def test_nan_of_a_row_that_is_not_chosen_stays_there() -> None:
    args = call("sparse_mla_attention", [1, 2], [400, 90], topk=20)
    clean = kernel("sparse_mla_attention", **args)
    for sequence, first in ((0, 0), (1, 1)):
        rows = slice(first, first + 1 + sequence)
        chosen = set(args["topk_indices"][rows].flatten().tolist())
        for position in set(range(90)) - chosen:
            at = args["block_table"][sequence, position // 16].item(), position % 16
            args["ckv_cache"][at] = args["kpe_cache"][at] = torch.nan
    assert_equal(kernel("sparse_mla_attention", **args), clean)
    at = int(args["topk_indices"][0].max())
    args["kpe_cache"][args["block_table"][0, at // 16].item(), at % 16, 5] = torch.nan
    out, lse = kernel("sparse_mla_attention", **args)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert_equal((out[1:], lse[1:]), (clean[0][1:], clean[1][1:]))


def test_raw_scales_of_the_656_byte_record() -> None:
    """With scales that are no powers of two, bfloat16 tiles round the numbers, as FlashMLA does; floats do not."""
    for dtype, factor in ((torch.float32, 1), (torch.bfloat16, 1)):
        args = call("sparse_mla_attention", [1], [300], dtype)
        rows = torch.cat((args["ckv_cache"], args["kpe_cache"]), -1).nan_to_num(1.0)
        args |= dict(ckv_cache=pack_record(rows, "v32_fp8_656", "amax"), kpe_cache=None, kv_format="v32_fp8_656")
        want = registry["sparse_mla_attention"].reference(**registry["sparse_mla_attention"].bind((), args))
        got = kernel("sparse_mla_attention", **args)
        assert difference(got[0], want[0]) <= TOLERANCES[dtype] * factor
        assert difference(got[1], want[1]) <= TOLERANCES[torch.float32 if dtype is torch.float32 else torch.bfloat16]


def test_every_record_of_index_keys_is_tested_here() -> None:
    held = {name.removeprefix("v41_") for name in formats.record_names() if formats.record(name).holds == "index_key"}
    assert held == set(KV_FORMATS) - {"auto"}
