"""The CPU attention kernels beyond the contract: each instruction set, memory safety, what a row may depend on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbackend import ArgumentError, native
from kvbackend.matrix import DTYPES, TOLERANCES, difference, in_float64
from kvbackend.ops import registry

from .common import assert_equal, assert_isa, call, check_batch_mates, check_threads, run_on_isa

NAMES = ("paged_attention", "mla_attention")
EVERY_OP = pytest.mark.parametrize("name", NAMES)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def kernel(name: str, **args: Any) -> tuple[Tensor, Tensor]:
    """The native kernel itself, past the dispatcher."""
    assert native.library("cpu").reason is None
    bound = registry[name].bind((), args)
    return native.kernel(registry[name])(*bound.values())


def reference(name: str, **args: Any) -> tuple[Tensor, Tensor]:
    return registry[name].reference(**registry[name].bind((), args))


def exact_reference(name: str, **args: Any) -> tuple[Tensor, Tensor]:
    """The reference, computed in float64: in float32 its own products may round as much as a kernel may."""
    out, lse = reference(name, **in_float64(registry[name], args))
    return out.to(args[queries(name)[0]].dtype), lse.float()


def assert_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], message: str = "", factor: float = 1) -> None:
    for what, a, b in zip(("out", "lse"), got, want, strict=True):
        assert difference(a, b) <= TOLERANCES[b.dtype] * factor, f"{message} {what}: {difference(a, b)}"


def queries(name: str) -> tuple[str, ...]:
    return ("q",) if name == "paged_attention" else ("q_nope", "q_pe")


# ------------------------------------------------------------------------------------------------- instruction sets


SHAPES = [
    dict(heads=1, kv_heads=1, dim=64),
    dict(heads=4, kv_heads=2, dim=64),
    dict(heads=8, kv_heads=2, dim=64),
    dict(heads=6, kv_heads=1, dim=32),
    dict(heads=32, kv_heads=2, dim=64),
    dict(heads=72, kv_heads=1, dim=96),
    dict(heads=144, kv_heads=1, dim=32),
    dict(heads=6, kv_heads=2, dim=5),
]  # heads of a kv head: 1, 2, 4, 6, 16, 72, 144; the last with a dim that no vector divides


def check_this_isa(wanted: str) -> None:
    """Everything that depends on the instruction set; runs in a process of its own."""
    assert_isa(wanted)
    for name in NAMES:
        for dtype in DTYPES:
            for sample, args in registry[name].make_samples("cpu", dtype):
                assert_close(kernel(name, **args), exact_reference(name, **args), f"{name} {dtype} {sample}")
            for shape in SHAPES:
                many = 70 * shape["kv_heads"] // shape["heads"] + 2  # more queries than one task takes
                args = call(name, [1, 3, many], [700, 90, 130], dtype, **shape)
                assert_close(kernel(name, **args), exact_reference(name, **args), f"{name} {dtype} {shape}", factor=2)


@pytest.mark.parametrize("wanted", native.CPU_ISAS)
def test_every_instruction_set_equals_the_reference(wanted: str) -> None:
    run_on_isa(wanted, f"from tests.cpu.test_attention_kernels import check_this_isa; check_this_isa({wanted!r})")


# ---------------------------------------------------------------------------------------- what a row may depend on


@EVERY_OP
@EVERY_DTYPE
def test_the_number_of_threads_changes_no_bit(
    name: str, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    check_threads(partial(kernel, name), set_threads, **call(name, [1, 5, 150], [3000, 700, 200], dtype, heads=16))


@EVERY_DTYPE
def test_a_token_too_large_for_64_of_them_to_fit_half_of_l2(
    dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    args = call("paged_attention", [1, 2, 1], [700, 90, 17], dtype, heads=64, kv_heads=64, dim=128)
    assert_close(kernel("paged_attention", **args), reference("paged_attention", **args), factor=2)
    check_threads(partial(kernel, "paged_attention"), set_threads, **args)


@EVERY_OP
@EVERY_DTYPE
def test_batch_mates_change_no_bit(name: str, dtype: torch.dtype) -> None:
    q_lens = [1, 4, 90, 1]
    check_batch_mates(partial(kernel, name), q_lens, **call(name, q_lens, [1500, 600, 400, 1], dtype, heads=16))


@EVERY_OP
@pytest.mark.parametrize("heads", [16, 72])
def test_where_keys_lie_changes_no_bit(name: str, heads: int) -> None:
    """Tiles read keys in their cache where 16 follow each other in a block, and copies of them where not."""
    args = call(name, [1, 3, 40], [700, 90, 130], torch.bfloat16, heads=heads, kv_heads=1, rope=32, block_size=32)
    apart = dict(args)
    for key in args:
        if key.endswith("_cache"):
            apart[key] = args[key].unflatten(1, (8, 4)).flatten(0, 1)
    apart["block_table"] = (args["block_table"][..., None] * 8 + torch.arange(8, dtype=torch.int32)).flatten(1)
    assert_equal(kernel(name, **apart), kernel(name, **args))


def check_where_heads_lie(wanted: str) -> None:
    """Rows of all heads that lie side by side are gone through a few keys at a time, else one head after the other."""
    assert_isa(wanted)
    generator = torch.Generator().manual_seed(3)
    for dtype, members in product(DTYPES, (1, 2, 3, 4, 5, 7, 8)):
        args = call("paged_attention", [1, 1, 1], [333, 64, 130], dtype, heads=4 * members, kv_heads=4)
        args["q"] = args["q"].abs()
        for token in range(333):  # peaks grow
            args["key_cache"][args["block_table"][0, token // 16].item(), token % 16] += token / 100
        args["block_table"][0, 4:9] = -1  # a tile without a key
        bias = torch.randn(args["key_cache"].shape[:3], generator=generator)
        for options in ({}, dict(window=100, softcap=3.0), dict(key_bias=bias)):
            apart = kernel("paged_attention", **args, **options)
            assert_close(apart, exact_reference("paged_attention", **args, **options), f"{dtype} {members}", factor=2)
            for sides in (["key_cache"], ["value_cache"], ["key_cache", "value_cache"]):
                together = {side: args[side].contiguous() for side in sides}
                assert_equal(kernel("paged_attention", **args | together, **options), apart)


@pytest.mark.parametrize("wanted", native.CPU_ISAS)
def test_where_heads_lie_changes_no_bit(wanted: str) -> None:
    run_on_isa(wanted, f"from tests.cpu.test_attention_kernels import check_where_heads_lie as c; c({wanted!r})")


@EVERY_DTYPE
def test_windows_sinks_and_caps_hold_across_splits(dtype: torch.dtype) -> None:
    args = call("paged_attention", [1, 7], [2500, 1300], dtype)
    for options in (
        dict(window=600),
        dict(window=1200, causal=False),
        dict(softcap=5.0, softmax_scale=1.0),
        dict(sinks=torch.linspace(-3, 4, 8)),
        dict(sinks=torch.linspace(-3, 4, 8, dtype=torch.bfloat16), window=1, softcap=2.0),
    ):
        wanted = reference("paged_attention", **args | options)
        assert_close(kernel("paged_attention", **args | options), wanted, str(options), factor=2)


def test_missing_blocks_hold_across_splits() -> None:
    args = call("paged_attention", [1, 7], [2500, 1300])
    args["block_table"][0, 3:150:2] = -1
    args["block_table"][1, :70] = -1  # two splits without a key, but for the last blocks of the second
    assert_close(kernel("paged_attention", **args), reference("paged_attention", **args))


# -------------------------------------------------------------------------------------------------------- numbers


@EVERY_OP
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits_survive(name: str, scale: float) -> None:
    args = call(name, [1, 40], [900, 80], softmax_scale=scale)
    out, lse = kernel(name, **args)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    exact, exact_lse = reference(name, **in_float64(registry[name], args))
    assert difference(lse, exact_lse.float()) < 1e-6  # at such logits only the largest key counts, unless nearly tied
    agree = (out - exact).abs().amax(-1) < 1e-2
    assert agree.float().mean() > 0.95


@EVERY_DTYPE
@pytest.mark.parametrize("heads", [2, 4, 8, 16, 40, 144])
def test_peaks_that_grow_from_tile_to_tile(dtype: torch.dtype, heads: int) -> None:
    """What was summed up before is worth less with each."""
    args = call("paged_attention", [1, 3], [700, 90], dtype, heads=heads)
    args["q"] = args["q"].abs()
    for row, length in enumerate(args["seq_lens"].tolist()):
        for token in range(length):
            args["key_cache"][args["block_table"][row, token // 16].item(), token % 16] = 2 * token / length
    out, lse = kernel("paged_attention", **args)
    assert_close((out, lse), exact_reference("paged_attention", **args), factor=2)


@EVERY_OP
@EVERY_DTYPE
def test_equal_logits_give_the_mean(name: str, dtype: torch.dtype) -> None:
    args = call(name, [1], [1000], dtype)
    args |= {key: torch.zeros_like(args[key]) for key in queries(name)}
    out, lse = kernel(name, **args)
    torch.testing.assert_close(lse, torch.full_like(lse, 1000.0).log(), rtol=1e-6, atol=0)
    assert_close((out, lse), reference(name, **args), factor=2)


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("dim", [64, 5])
def test_nan_of_a_real_key_or_query_reaches_its_rows_only(name: str, dtype: torch.dtype, dim: int) -> None:
    args = call(name, [2, 40], [600, 40], dtype, dim=dim)
    clean = kernel(name, **args)
    for cache in [args[key] for key in args if key.endswith("_cache")]:
        cache[args["block_table"][1, 0].item(), 3] = torch.nan
    out, lse = kernel(name, **args)
    assert out[5:].isnan().all()  # queries from the fourth token of the second sequence on
    assert lse[5:].isnan().all()
    assert_equal((out[:2], lse[:2]), (clean[0][:2], clean[1][:2]))
    for key in queries(name):
        args[key] = args[key].clone()
        args[key][0, 1] = torch.nan
    out, lse = kernel(name, **args)
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan()
    assert_equal((out[1], lse[1]), (clean[0][1], clean[1][1]))


@EVERY_DTYPE
@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32, 40, 144])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_number_of_a_value_that_is_not_finite_reaches_its_dim_only(
    dtype: torch.dtype, heads: int, wrong: float
) -> None:
    args = call("paged_attention", [1, 3], [700, 90], dtype, heads=heads)
    args["value_cache"][args["block_table"][0, 20].item(), 9, 1, 7] = wrong
    out, lse = kernel("paged_attention", **args)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[0, heads // 2 :, 7] = True
    assert torch.equal(~out.isfinite(), spoilt)
    want = exact_reference("paged_attention", **args)
    assert_close((out.masked_fill(spoilt, 0), lse), (want[0].masked_fill(spoilt, 0), want[1]), factor=2)


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("run", [kernel, reference])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_stays_in_its_sequence_its_kv_head_and_its_call(
    name: str, dtype: torch.dtype, run: Callable[..., tuple[Tensor, Tensor]], wrong: float
) -> None:
    """Queries before it weigh it with 0, which may make them NaN; nothing else changes."""
    args = call(name, [2, 40, 3], [600, 60, 9], dtype)
    clean = run(name, **args)
    if name == "paged_attention":
        value, heads = args["value_cache"][:, :, 1], slice(4, 8)
    else:
        value, heads = args["ckv_cache"], slice(0, 8)
    value[args["block_table"][1, 1].item(), 14] = wrong  # token 30: the sequence's queries are tokens 20 to 59
    out, lse = run(name, **args)
    reached = torch.zeros(out.shape[:2], dtype=torch.bool)
    reached[2:42, heads] = True
    assert not out[12:42, heads].isfinite().any(-1).any()
    assert_equal((out[~reached], lse[:12], lse[42:]), (clean[0][~reached], clean[1][:12], clean[1][42:]))
    args |= dict(seq_lens=torch.tensor([600, 30, 9]).int(), cu_seqlens_q=torch.tensor([0, 2, 12, 15]).int())
    earlier, _ = run(name, **args | {key: torch.cat((args[key][:12], args[key][42:])) for key in queries(name)})
    assert earlier.isfinite().all()


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 2, 3])
def test_an_infinite_last_value_is_no_nan(dtype: torch.dtype, length: int) -> None:
    """Loops that take values in twos have none beside the last of an odd number."""
    args = call("paged_attention", [1], [length], dtype)
    args["value_cache"][args["block_table"][0, 0].item(), length - 1, 1] = torch.inf
    out, _ = kernel("paged_attention", **args)
    assert (out[0, 4:] == torch.inf).all()
    assert out[0, :4].isfinite().all()


@EVERY_DTYPE
@pytest.mark.parametrize("run", [kernel, reference])
def test_nan_of_a_token_before_the_window_stays_there(
    dtype: torch.dtype, run: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    args = call("paged_attention", [1, 3, 40], [600, 60, 90], dtype, window=20)
    clean = run("paged_attention", **args)
    for row, first in enumerate((580, 38, 31)):  # the first token that the sequence's first query sees
        for token in range(first):
            block = args["block_table"][row, token // 16].item()
            for cache in ("key_cache", "value_cache"):
                args[cache][block, token % 16] = torch.nan
    assert_equal(run("paged_attention", **args), clean)


# ------------------------------------------------------------------------------------------------- values gone wrong


def guarded(tensor: Tensor, room: int = 4096) -> tuple[Tensor, Tensor]:
    """A copy amid NaN (or a block id that no pool has), and the whole of what it lies in."""
    strange = torch.nan if tensor.is_floating_point() else 1 << 20
    whole = torch.full((tensor.numel() + 2 * room,), strange, dtype=tensor.dtype)
    inner = whole[room : room + tensor.numel()].view(tensor.shape)
    inner.copy_(tensor)
    return inner, whole


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
    "max_seqlen_q too small": dict(max_seqlen_q=1),
}


@EVERY_OP
@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_values_stay_within_the_tensors(name: str, case: str) -> None:
    args = call(name, [3, 2], [70, 40])
    for key, value in GARBAGE[case].items():
        if torch.is_tensor(args[key]):
            args[key] = torch.tensor(value).int().expand(args[key].shape).clone()
        else:
            args[key] = value
    wholes = {}
    for key, value in args.items():
        if torch.is_tensor(value):
            args[key], wholes[key] = guarded(value.nan_to_num(0.5) if value.is_floating_point() else value)
    before = {key: whole.clone() for key, whole in wholes.items()}
    out, lse = kernel(name, **args)
    assert not out.isnan().any()  # no row from outside
    assert not lse.isnan().any()
    for key, whole in wholes.items():
        assert torch.equal(whole.nan_to_num(7.0), before[key].nan_to_num(7.0)), f"{key} was written"
    if "block" in case:
        assert not out.any()
        assert (lse == -torch.inf).all()
    if case == "lengths past the table":
        full = args | {"seq_lens": torch.full_like(args["seq_lens"], args["block_table"].shape[1] * 16)}
        assert_equal((out, lse), kernel(name, **full))


@EVERY_OP
def test_wide_block_ids_are_not_cut_to_32_bits(name: str) -> None:
    args = call(name, [1], [40])
    args["block_table"] = args["block_table"].long() + 2**32
    out, lse = kernel(name, **args)
    assert not out.any()
    assert (lse == -torch.inf).all()


@EVERY_OP
def test_offsets_that_do_not_start_at_zero_are_refused(name: str) -> None:
    args = call(name, [3, 2], [70, 40])
    args["cu_seqlens_q"] = args["cu_seqlens_q"] + 1
    with pytest.raises(RuntimeError, match=r"\[kvbackend\] cu_seqlens_q starts with 1; .*: prepend a 0"):
        kernel(name, **args)
    with pytest.raises(ArgumentError, match="must start with 0"):
        registry[name](**args)


@EVERY_OP
@pytest.mark.parametrize("tail", [0, 3])
def test_queries_past_the_batch_give_nothing(name: str, tail: int) -> None:
    args = call(name, [1, 2], [5, 9])
    for key in queries(name):
        args[key] = torch.cat((args[key], torch.full_like(args[key][:tail], torch.nan)))
    out, lse = kernel(name, **args)
    assert not out[3:].any()
    assert (lse[3:] == -torch.inf).all()
    assert out[:3].isfinite().all()


@EVERY_OP
def test_queries_that_are_not_there_move_no_other(name: str) -> None:
    args = call(name, [1, 6], [5, 90])
    whole = kernel(name, **args)
    args |= {key: args[key][:-2] for key in queries(name)}
    assert_close(kernel(name, **args), (whole[0][:-2], whole[1][:-2]))
    assert_close(reference(name, **args), (whole[0][:-2], whole[1][:-2]))


# ------------------------------------------------------------------------------------------------- strides, addresses


@EVERY_OP
@EVERY_DTYPE
def test_offsets_past_two_to_the_31_elements(name: str, dtype: torch.dtype) -> None:
    """Blocks lie so far apart that stride times id passes 2^31; only the pages in use are ever backed by memory."""
    args = call(name, [1, 2], [40, 33], dtype)
    apart = (1 << 31) // 6 + 64
    for key in [key for key in args if key.endswith("_cache")]:
        cache = args[key]
        virtual = torch.empty(cache.shape[0] * apart, dtype=dtype)
        far = virtual.as_strided(cache.shape, (apart, *cache.contiguous().stride()[1:]))
        far.copy_(cache)
        args[key + "_far"] = far
    far_args = {key: args.pop(key + "_far", value) for key, value in list(args.items()) if not key.endswith("_far")}
    assert max(far_args["block_table"].flatten().tolist()) * apart > 1 << 31
    assert_equal(kernel(name, **far_args), kernel(name, **args))


@EVERY_OP
@EVERY_DTYPE
def test_any_strides(name: str, dtype: torch.dtype) -> None:
    args = call(name, [1, 2], [40, 33], dtype)
    wanted = kernel(name, **args)
    strided = dict(args)
    for key, value in args.items():
        if torch.is_tensor(value):  # the last dim first in memory, and every second element only
            last_first = value.movedim(-1, 0).contiguous().movedim(0, -1)
            strided[key] = torch.stack((last_first, last_first), -1)[..., 0]
    assert not strided["block_table"].is_contiguous()
    assert_close(kernel(name, **strided), wanted)
    same = dict(args)
    for key in queries(name):  # stride 0
        same[key] = args[key][:1].expand_as(args[key])
    assert_equal(kernel(name, **same), kernel(name, **same | {key: same[key].contiguous() for key in queries(name)}))
