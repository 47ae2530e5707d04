"""The CPU kernels of dynamic sparsity: each instruction set, what a row may depend on, values gone wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kvbackend import native
from kvbackend.matrix import DTYPES, TOLERANCES, difference, run_cell
from kvbackend.ops import registry

from .common import assert_equal, assert_isa, check_batch_mates, check_threads, run_on_isa
from .test_attention_kernels import guarded
from .test_sparse_kernels import kernel

NAMES = ("page_logits", "token_logits", "sparse_attention")
EVERY = pytest.mark.parametrize("name", NAMES)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def call(
    name: str, q_lens: list[int], seq_lens: list[int], dtype: torch.dtype = torch.float32, heads: int = 8,
    kv_heads: int = 2, dim: int = 64, block_size: int = 32, page_size: int = 16, **other: Any,
) -> dict[str, Any]:  # fmt: skip
    """A call over caches that are NaN wherever no token lies. page_logits has a row for each page in its blocks."""
    draw = torch.Generator().manual_seed(11)
    tokens_of_row = page_size if name == "page_logits" else 1
    lengths = [-(-length // tokens_of_row) for length in seq_lens]
    columns = max(1, *(-(-length // block_size) for length in lengths))
    num_blocks = len(lengths) * columns + 1
    table = torch.randperm(num_blocks, generator=draw)[: len(lengths) * columns].view(len(lengths), columns)
    caches = []
    for _ in range(2):
        cache = torch.full((num_blocks, block_size, kv_heads, dim), torch.nan, dtype=dtype)
        for blocks, length in zip(table, lengths, strict=True):
            index = torch.arange(length)
            rows = torch.randn(length, kv_heads, dim, generator=draw).to(dtype)
            cache[blocks[index // block_size], index % block_size] = rows
        caches.append(cache)
    tokens = sum(q_lens)
    args = dict(
        q=torch.randn(tokens, heads, dim, generator=draw).to(dtype), block_table=table.int(),
        seq_lens=torch.tensor(seq_lens).int(), cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        max_seqlen_q=max(q_lens), page_size=page_size, num_sinks=3, num_recent=20,
    )  # fmt: skip
    if name == "page_logits":
        return args | dict(low_cache=caches[0], high_cache=caches[1]) | other
    highest = max(seq_lens) // (page_size if name == "token_logits" else 1)
    chosen = torch.randint(-1, highest + 1, (tokens, kv_heads, 70), generator=draw).int()
    if name == "token_logits":
        return args | dict(key_cache=caches[0], pages=chosen) | other
    whole = dict(key_cache=caches[0], value_cache=caches[1], topk_indices=chosen, softmax_scale=0.1, return_lse=True)
    return args | whole | other


def check_this_isa(wanted: str) -> None:
    """Everything that depends on the instruction set; runs in a process of its own."""
    assert_isa(wanted)
    for name in NAMES:
        for dtype in DTYPES:
            for sample, args in registry[name].make_samples("cpu", dtype):
                cell = run_cell(registry[name], "cpu", "cpu", dtype, sample, args)
                assert cell.status == "pass", f"{name} {dtype} {sample}: {cell}"
            for heads, dim in ((1, 64), (4, 128), (7, 80), (32, 40), (70, 33)):
                args = call(name, [1, 5], [700, 190], dtype, 2 * heads, dim=dim)
                cell = run_cell(registry[name], "cpu", "cpu", dtype, f"{heads} of {dim}", args)
                assert cell.status == "pass", cell


@pytest.mark.parametrize("wanted", native.CPU_ISAS)
def test_every_instruction_set_equals_the_reference(wanted: str) -> None:
    run_on_isa(
        wanted, f"from tests.cpu.test_dynamic_sparsity_kernels import check_this_isa; check_this_isa({wanted!r})"
    )


@EVERY
@EVERY_DTYPE
def test_the_number_of_threads_changes_no_bit(
    name: str, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    check_threads(partial(kernel, name), set_threads, **call(name, [1, 5, 30], [5000, 700, 200], dtype))


@EVERY
@EVERY_DTYPE
def test_batch_mates_change_no_bit(name: str, dtype: torch.dtype) -> None:
    q_lens = [1, 4, 17, 1]
    check_batch_mates(partial(kernel, name), q_lens, **call(name, q_lens, [1500, 600, 400, 1], dtype))


GARBAGE: dict[str, dict[str, Any]] = {
    "block ids past the pool": dict(block_table=2**30),
    "negative block ids": dict(block_table=-(2**31)),
    "lengths past the table": dict(seq_lens=2**31 - 1),
    "negative lengths": dict(seq_lens=-5),
    "offsets past the queries": dict(cu_seqlens_q=[0, 2**31 - 1, 2**31 - 1]),
    "falling offsets": dict(cu_seqlens_q=[0, 3, -7]),
    "more queries than tokens": dict(seq_lens=1),
    "max_seqlen_q of 0": dict(max_seqlen_q=0),
    "choices past the table": dict(pages=2**31 - 1, topk_indices=2**31 - 1),
    "negative choices": dict(pages=-(2**31), topk_indices=-(2**31)),
    "more sinks than tokens": dict(num_sinks=2**40),
    "more recent tokens than there are": dict(num_recent=2**40),
    "a page of all": dict(page_size=2**20),
}


@EVERY
@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_values_stay_within_the_tensors(name: str, case: str) -> None:
    if name == "token_logits" and "page_size" in GARBAGE[case]:
        pytest.skip("its result has page_size columns for each page")
    args = call(name, [3, 2], [70, 140], heads=4)
    if "choices" in case and name == "page_logits":
        pytest.skip("page_logits is given no choice")
    for key, value in GARBAGE[case].items():
        if torch.is_tensor(args.get(key)):
            args[key] = torch.tensor(value).int().expand(args[key].shape).clone()
        elif key in args:
            args[key] = value
    wholes = {}
    for key, value in args.items():
        if torch.is_tensor(value):
            args[key], wholes[key] = guarded(value.nan_to_num(0.5) if value.is_floating_point() else value)
    before = {key: whole.clone() for key, whole in wholes.items()}
    results = kernel(name, **args)
    for key, whole in wholes.items():
        assert torch.equal(whole.nan_to_num(7.0), before[key].nan_to_num(7.0)), f"{key} was written"
    assert not any(result.isnan().any() for result in results)  # no row from outside
    if "block ids" in case or ("choices" in case and name == "token_logits"):
        assert (results[0] == (0 if name == "sparse_attention" else -torch.inf)).all()


@EVERY
@EVERY_DTYPE
def test_any_strides(name: str, dtype: torch.dtype) -> None:
    args = call(name, [1, 2], [140, 133], dtype, heads=4)
    strided = dict(args)
    for key, value in args.items():
        if torch.is_tensor(value):  # the last dim first in memory, and every second element only
            last_first = value.movedim(-1, 0).contiguous().movedim(0, -1)
            strided[key] = torch.stack((last_first, last_first), -1)[..., 0]
    assert not strided["block_table"].is_contiguous()
    for got, want in zip(kernel(name, **strided), kernel(name, **args), strict=True):
        assert difference(got, want) <= TOLERANCES[want.dtype]  # rows read in place are added up in another way


@EVERY
def test_offsets_past_two_to_the_31_elements(name: str) -> None:
    """Blocks lie so far apart that stride times id passes 2^31; only the pages in use are ever backed by memory."""
    args = call(name, [1, 2], [140, 133], heads=4, block_size=4 if name == "page_logits" else 64)
    apart = (1 << 31) // (args["block_table"].numel() - 1) + 64
    far = dict(args)
    for key in [key for key in args if key.endswith("_cache")]:
        virtual = torch.empty(args[key].shape[0] * apart, dtype=args[key].dtype)
        far[key] = virtual.as_strided(args[key].shape, (apart, *args[key].stride()[1:]))
        far[key].copy_(args[key])
    assert int(args["block_table"].max()) * apart >= 1 << 31
    assert_equal(kernel(name, **far), kernel(name, **args))
