"""The CPU attention kernels over quantized caches: every format and instruction set, and what they must not hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbackend import formats, native
from kvbackend.backends.cpu import takes
from kvbackend.codecs import split
from kvbackend.matrix import DTYPES, TOLERANCES, copy_arguments, difference, flat_results, in_float64
from kvbackend.ops import registry

from .common import assert_isa, call, run_on_isa, run_python

FORMATS = [
    name if choice == formats.get(name).choices[0] else f"{name}:{choice}"
    for name in formats.names()
    if formats.get(name).quantized
    for choice in formats.get(name).choices
]
PAIRS = ["int8/fp8_e4m3", "fp8_e5m2:channel/mxfp4", "int4/bf16", "nvfp4/fp8_e4m3:16", "auto/fp4_e2m1", "mxfp8/int4:64"]
MLA_FORMATS = [name for name in FORMATS if formats.get(name).granularity in ("tensor", "token_head", "group")]


def encoded(cache: Tensor, name: str, role: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes, static or global scale, and scales of tokens, of pages [nb, bs, Hk, D] that are NaN where nothing is.

    There the codes, and the scales if tokens have some of their own, are made of bits that are NaN where they can be.
    """
    fmt = formats.get(name)
    empty = cache.flatten(2).isnan().any(-1)  # [nb, bs]
    rows = cache.float()
    global_scale = split.global_scale_of(rows) if fmt.global_scale else None
    codes, scales = split.encode(rows, fmt, role, global_scale)
    bits = codes.view(torch.uint8)
    bits[empty] = 0xFF
    if fmt.granularity in split.STATIC:
        return codes, scales, None
    if not split.across_tokens(fmt, role):
        scales.view(torch.uint8)[empty] = 0xFF
    return codes, global_scale, scales


def quantized(name: str, kv_format: str, dtype: torch.dtype = torch.float32, **shape: Any) -> dict[str, Any]:
    """A call whose caches are stored in a format."""
    key_format = formats.get(formats.pair(kv_format)[0].replace("auto", "bf16"))
    whole = (key_format.group or 1) if key_format.granularity == "kivi" else 1  # keys have whole groups of tokens
    q_lens, seq_lens = shape.pop("q_lens", [1, 3, 40]), shape.pop("seq_lens", [333, 90, 131])
    seq_lens = [-(-length // whole) * whole for length in seq_lens]
    args = call(
        "mla_attention" if name == "mla_attention" else "paged_attention", q_lens, seq_lens, dtype,
        **{"block_size": 128, "dim": 128, **shape},
    )  # fmt: skip
    if name == "mla_attention":
        codes, args["k_scale"], scales = encoded(args["ckv_cache"][:, :, None], kv_format, "key")
        args["ckv_cache"] = codes[:, :, 0]
        args["k_scale_cache"] = None if scales is None else scales[:, :, 0]
        return args | {"kv_format": kv_format}
    for side, short, role in zip(formats.pair(kv_format), "kv", ("key", "value"), strict=True):
        if side != "auto" and formats.get(side).quantized:
            cache = f"{role}_cache"
            args[cache], args[f"{short}_scale"], args[f"{short}_scale_cache"] = encoded(args[cache], side, role)
    if name == "accumulate_scores":
        args = {key: value for key, value in args.items() if not key.startswith("v") and key != "return_lse"}
        args["scores"] = torch.zeros(len(seq_lens), args["key_cache"].shape[2], max(seq_lens))
    return args | {"kv_format": kv_format}


def kernel(name: str, args: dict[str, Any]) -> dict[str, Tensor]:
    """What the native kernel gives back and writes, past the dispatcher."""
    assert native.library("cpu").reason is None
    args = copy_arguments(args)
    values = {
        key: takes.scale_bytes(value) if key.endswith("_scale_cache") else value
        for key, value in registry[name].bind((), args).items()
    }
    return flat_results(registry[name], native.kernel(registry[name])(*values.values()), args)


def assert_reference(name: str, args: dict[str, Any], message: str = "") -> None:
    """As close to the reference in float64 as without a format; sums and products in another order get twice that."""
    exact = in_float64(registry[name], args)
    want = flat_results(registry[name], registry[name].reference(**registry[name].bind((), exact)), exact)
    for what, got in kernel(name, args).items():
        apart = difference(got, want[what].to(got.dtype))
        assert apart <= 2 * TOLERANCES[got.dtype], f"{name} {args['kv_format']} {message} {what}: {apart}"


def check_every_code(kv_format: str, *, also_nan: bool) -> None:
    """A query that sees one token gets that token's value, whatever its code, to the bit."""
    fmt = formats.get(kv_format)
    bits = torch.arange(256, dtype=torch.uint8)
    codes = bits.view(split.storage(fmt)).view(1, 1, 1, 256)
    if not also_nan:  # rows without one may be read in another way
        bits[codes.float().isnan().flatten()] = 0
    dim = 256 * split.per_byte(fmt)
    scales = torch.full(split.scales_shape(fmt, "value", (1, 1, dim)), 0.75)
    own = {"v_scale_cache": scales[None]} if fmt.granularity == "token_head" else {"v_scale": scales}
    want = split.decode(codes, own.get("v_scale_cache", scales), fmt, "value")
    for dtype, heads in product((torch.float32, torch.bfloat16), (1, 4, 32)):  # in place, and as rows of numbers
        args = dict(
            q=torch.ones(1, heads, dim, dtype=dtype), key_cache=torch.zeros(1, 1, 1, dim, dtype=dtype),
            value_cache=codes, block_table=torch.tensor([[0]]), seq_lens=torch.tensor([1]).int(),
            cu_seqlens_q=torch.tensor([0, 1]).int(), max_seqlen_q=1, softmax_scale=1.0, kv_format=f"auto/{kv_format}",
        )  # fmt: skip
        out, message = kernel("paged_attention", args | own)["output 0"], f"{fmt} {dtype} {heads}"
        torch.testing.assert_close(out, want[0].to(dtype).expand_as(out), rtol=0, atol=0, equal_nan=True, msg=message)


def check_this_isa(wanted: str) -> None:
    """Everything that depends on the instruction set; runs in a process of its own."""
    assert_isa(wanted)
    for kv_format in ("fp8_e4m3", "fp8_e4m3:channel", "fp8_e5m2:head", "int8", "fp4_e2m1:tensor"):
        check_every_code(kv_format, also_nan=True)
        check_every_code(kv_format, also_nan=False)
    for dtype in DTYPES:
        plain = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        for kv_format in [*FORMATS, *(pair.replace("bf16", plain) for pair in PAIRS)]:
            for heads, last in ((2, 40), (4, 40), (8, 40), (40, 5)):  # of a kv head: 1, 2, 4, 20
                args = quantized("paged_attention", kv_format, dtype, heads=heads, q_lens=[1, 3, last])
                assert_reference("paged_attention", args)
            assert_reference("accumulate_scores", quantized("accumulate_scores", kv_format, dtype))
        for kv_format in MLA_FORMATS:
            for heads in (3, 16):
                assert_reference("mla_attention", quantized("mla_attention", kv_format, dtype, heads=heads))


@pytest.mark.parametrize("wanted", native.CPU_ISAS)
def test_every_format_and_instruction_set_equals_the_reference(wanted: str) -> None:
    run_on_isa(wanted, f"from tests.cpu.test_quantized_attention import check_this_isa; check_this_isa({wanted!r})")


SHARED = [
    ("nvfp4", 32), ("mxfp4", 64), ("fp4_e2m1", 96), ("fp4_e2m1:64", 128), ("mxfp4/nvfp4", 192), ("fp4_e2m1", 256),
    ("fp4_e2m1:128", 256), ("nvfp4", 512),
]  # fmt: skip


@pytest.mark.parametrize(("kv_format", "dim"), SHARED)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_each_scale_multiplies_the_codes_that_share_it(kv_format: str, dim: int, group: int) -> None:
    """For any number of query heads a kv head, dims of a row and dims a scale, also where a scale is NaN."""
    args = quantized(
        "paged_attention", kv_format, torch.bfloat16, heads=2 * group, kv_heads=2, dim=dim, block_size=16,
        q_lens=[1, 1, 2, 1, 1], seq_lens=[1, 15, 17, 48, 333],
    )  # fmt: skip
    assert_reference("paged_attention", args, "scales as they are")
    block, slot = args["block_table"][4, 10], 9
    args["v_scale_cache"].view(torch.uint8)[block, slot, 1, -1] = 0xFF
    out = kernel("paged_attention", args)["output 0"]
    assert 0 < out[5, group:].isnan().sum() < group * dim, "one scale spoils its dims only"
    assert_reference("paged_attention", args, "a value's scale is NaN")
    args["k_scale_cache"].view(torch.uint8)[block, slot, 0, 0] = 0xFF
    assert_reference("paged_attention", args, "a key's scale is NaN")


@pytest.mark.parametrize("kv_format", ["nvfp4", "mxfp4", "fp4_e2m1:128"])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_where_heads_and_their_scales_lie_changes_no_bit(
    kv_format: str, group: int, set_threads: Callable[[int], None]
) -> None:
    """Rows of all heads that lie side by side are gone through a few keys at a time, else one head after the other."""
    args = quantized(
        "paged_attention", kv_format, torch.bfloat16, heads=4 * group, kv_heads=4, block_size=16,
        q_lens=[1, 1, 1], seq_lens=[64, 13, 333],
    )  # fmt: skip
    args["v_scale_cache"].view(torch.uint8)[args["block_table"][0, 0], 13, 1, 0] = 0xFF  # just past the next one's keys
    set_threads(1)  # so all heads are of one task, and all tasks of one thread
    wanted = kernel("paged_attention", args)
    assert wanted["output 0"][0].isnan().any()
    assert not wanted["output 0"][1:].isnan().any()
    for names in (["key_cache"], ["value_cache"], ["k_scale_cache"], ["v_scale_cache"], ["key_cache", "v_scale_cache"]):
        apart = {name: args[name].transpose(1, 2).contiguous().transpose(1, 2) for name in names}
        found = kernel("paged_attention", args | apart)
        for output in wanted:
            torch.testing.assert_close(found[output], wanted[output], rtol=0, atol=0, equal_nan=True, msg=str(names))


@pytest.mark.parametrize("kv_format", ["nvfp4", "mxfp4", "mxfp8", "fp4_e2m1:32"])
@pytest.mark.parametrize(
    ("kv_heads", "key_dim", "value_dim"),
    [
        (8, 128, 128),
        (16, 128, 128),
        (2, 64, 96),
        (2, 64, 160),
        (2, 128, 32),
        (2, 192, 64),
        (2, 0, 64),
        (66, 1024, 1024),
    ],
)
def test_scales_of_any_number_of_heads_and_groups(
    kv_format: str, kv_heads: int, key_dim: int, value_dim: int, set_threads: Callable[[int], None]
) -> None:
    """They are read for all heads of some tokens at a time; keys and values may have other dims, keys none at all."""
    members = 1 if kv_heads > 16 else 4
    args = quantized(
        "paged_attention", kv_format, torch.bfloat16, heads=members * kv_heads, kv_heads=kv_heads, block_size=16,
        dim=max(key_dim, value_dim), q_lens=[1, 1], seq_lens=[17, 77 if kv_heads > 16 else 141],
    )  # fmt: skip
    args["q"] = args["q"][..., :key_dim].contiguous()
    for side, dim in (("key", key_dim), ("value", value_dim)):
        for name in (f"{side}_cache", f"{side[0]}_scale_cache"):
            width = args[name].shape[-1] * dim // max(key_dim, value_dim)
            args[name] = args[name][..., :width].contiguous()
    for threads in (1, 2):
        set_threads(threads)
        assert_reference("paged_attention", args, f"{threads} threads")


@pytest.mark.parametrize(
    "kv_format", ["fp8_e4m3", "fp8_e4m3:token_head", "int8", "fp8_e5m2", "auto/fp8_e4m3", "int8/auto", "fp8_e4m3/int8"]
)
@pytest.mark.parametrize("dim", [32, 96, 160])
def test_codes_of_8_bits_in_rows_of_any_size(kv_format: str, dim: int) -> None:
    """Codes are read 64 at a time: what is left of a row, and the side that has no codes, lie in another order."""
    for group, block_size in ((2, 16), (4, 16), (8, 8), (4, 32)):
        args = quantized(
            "paged_attention", kv_format, torch.bfloat16, heads=2 * group, kv_heads=2, dim=dim, block_size=block_size,
            q_lens=[1, 1, 1], seq_lens=[15, 48, 333],
        )  # fmt: skip
        assert_reference("paged_attention", args, f"{group} heads on each, blocks of {block_size}")


HELD = """
import resource
import torch
from kvbackend import ops, use

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

codes = torch.empty(2048, 128, 8, 128, dtype=torch.uint8).fill_(0x30).view(torch.float8_e4m3fn)  # 256 MiB
rotary = torch.empty(4096, 128, 64, dtype=torch.bfloat16).fill_(0)
blocks = torch.arange(2048, dtype=torch.int32)
scale = torch.ones(1)

def attend(sequences, length):
    lengths = torch.full((sequences,), length, dtype=torch.int32)
    batch = blocks[: sequences * length // 128].view(sequences, -1), lengths, torch.arange(sequences + 1).int(), 1
    if {name!r} == "paged_attention":
        caches = codes[:1024], codes[1024:]
        return ops.paged_attention(
            torch.ones(sequences, 16, 128).bfloat16(), *caches, *batch, 0.1, k_scale=scale, v_scale=scale,
            kv_format="fp8_e4m3",
        )
    caches = codes.view(4096, 128, 512), rotary
    q = torch.ones(sequences, 16, 512).bfloat16(), torch.ones(sequences, 16, 64).bfloat16()
    return ops.mla_attention(*q, *caches, *batch, 0.1, kv_format="fp8_e4m3", k_scale=scale)

with use({backend!r}):
    attend(1, 256)
    before = peak()
    attend({sequences}, {length})
    print(peak() - before)
"""


@pytest.mark.parametrize(
    ("backend", "sequences", "length", "most"),
    [("cpu", 4, 32768, 16 << 20), ("reference", 4, 2048, 128 << 20)],  # the reference holds one sequence's rows
)
@pytest.mark.parametrize("name", ["paged_attention", "mla_attention"])
def test_no_copy_of_the_cache_is_made(name: str, backend: str, sequences: int, length: int, most: int) -> None:
    """A copy in numbers would be 512 MiB in bfloat16; the kernel holds tiles, the reference what a sequence reads."""
    held = int(run_python(HELD.format(name=name, backend=backend, sequences=sequences, length=length)))
    assert held < most, f"{held} bytes"
