"""Write key or value rows as codes and scales of a KV format."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float, Float32
from ..codecs import split
from ..facts import fact
from ..spec import op
from . import _checks
from ._samples import Maker

logger = logging.getLogger("kvbackend")


@op(group="formats", exact=True)
def quantize_kv(
    x: Float[Tensor, "T Hk D"],
    kv_format: str,
    scale: Float32[Tensor, "*scale"] | None = None,
    global_scale: Float32[Tensor, "1"] | None = None,
    role: str = "key",
) -> tuple[Tensor, Tensor]:
    """Quantize key or value rows to a KV format, giving codes and scales that are exact to the bit.

    x             [T, Hk, D], any strides; computed in float32, to which float64 is rounded
    kv_format     a name of `kvbackend.formats`, with a granularity or group where wanted: "fp8_e4m3:head", "int4:64"
    scale         dequantization multipliers of a format that has them per tensor [1], head [Hk] or channel [Hk, D];
                  None: computed from x. Other formats compute theirs, and take none.
    global_scale  [1], the second multiplier of "nvfp4", which needs it
    role          "key" or "value". Only "int4" asks: keys share scales across a group of tokens of one channel, values
                  across a group of channels of one token.
    Returns
    codes    [T, Hk, D] in the format's storage dtype; 4-bit codes [T, Hk, D / 2] uint8, even channel in the low nibble
    scales   multipliers on dequantization, in the format's scale dtype, one dim for each thing that has its own:
             per tensor [1], head [Hk], channel [Hk, D], token and head [T, Hk], group [T, Hk, D / group];
             int4 keys [T / group, Hk, D, 2] and values [T, Hk, D / group, 2], the last dim scale and minimum;
             [0] float32 where the format has none

    An all-zero group has codes 0 and the format's smallest scale. NaN becomes 0 and counts as 0 for the scale; how many
    there were is logged under KVBACKEND_CHECK=values. +-inf becomes the largest code of its sign, and counts as 65504
    for a computed scale. Formats without scales keep both. Undefined: a given scale that is not positive and finite.
    Source: OCP MX 1.0; KIVI (arXiv 2402.02750); NVIDIA NVFP4; DeepSeek-V4.1 (arXiv 2609.19969); vLLM 0.33 for int8.
    """
    codes, scales = split.encode(x, kv_format, role, global_scale, scale)
    return codes.contiguous(), scales.contiguous()  # whatever x's strides are


@quantize_kv.check
def _(x, kv_format, scale, global_scale, role, **_):
    fmt = formats.get(kv_format)
    split.check_arguments(fmt, role, global_scale, scale)
    split.check_head_dim(fmt, role, x.shape[2])
    if split.across_tokens(fmt, role):
        split.check_rest(fmt, fact(f"x.shape[0] % {fmt.group}", x=x))
    if scale is not None:
        shape = split.scales_shape(fmt, role, (0, x.shape[1], x.shape[2]))
        _checks.shape_is("scale", scale, shape, split.shape_text(fmt))


@quantize_kv.values
def _(x, kv_format, scale, global_scale, **_):
    for name, tensor in (("scale", scale), ("global_scale", global_scale)):
        if tensor is not None:
            _checks.positive(name, tensor)
    nans, infinities = int(x.isnan().sum()), int(x.isinf().sum())
    if formats.get(kv_format).quantized and nans + infinities:
        logger.warning(
            "quantize_kv: x holds %d NaN and %d infinities among %d numbers; %s writes NaN as 0 and lets inf saturate",
            nans, infinities, x.numel(), kv_format,
        )  # fmt: skip


@quantize_kv.fake
def _(x, kv_format, role, **_):
    fmt = formats.get(kv_format)
    codes = x.new_empty(split.codes_shape(fmt, x.shape), dtype=split.storage(fmt))
    return codes, x.new_empty(split.scales_shape(fmt, role, x.shape), dtype=split.scale_dtype(fmt))


def every_format() -> Iterator[tuple[str, str]]:
    """(kv_format, role) of every format, granularity and group."""
    for name in formats.names():
        fmt = formats.get(name)
        for choice in fmt.choices or ("",):
            for role in ("key", "value") if fmt.granularity == "kivi" else ("key",):
                yield f"{name}:{choice}" if choice else name, role


@quantize_kv.samples
def _(device, dtype):
    make = Maker(device, dtype)

    def rows(num_tokens: int, kv_heads: int = 2, head_dim: int = 128) -> Tensor:
        return make.randn(num_tokens, kv_heads, head_dim)

    def call(kv_format: str, x: Tensor, **other: Any) -> dict[str, Any]:
        number = torch.tensor([0.002]).to(device)
        return dict(
            x=x, kv_format=kv_format, **({"global_scale": number} if kv_format.startswith("nvfp4") else {}), **other
        )

    def positive(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=make.generator) * 0.02 + 0.005).to(device)

    yield "int8", call("int8", rows(13))
    yield "fp4_e2m1", call("fp4_e2m1", rows(5))
    yield "int4 values", call("int4:32", rows(3), role="value")
    for kv_format, role in every_format():
        by_tokens = kv_format.startswith("int4") and role == "key"
        yield f"{kv_format} {role}", call(kv_format, rows(128 if by_tokens else 5), role=role)
        yield f"{kv_format} {role}, no tokens", call(kv_format, rows(0), role=role)
    for name in ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1:tensor"):
        yield f"{name}, given scale", call(name, rows(5), scale=positive(1))
    yield "given scale per head", call("fp8_e4m3:head", rows(5), scale=positive(2))
    yield "given scale per channel", call("fp8_e4m3:channel", rows(5), scale=positive(2, 128))
    yield "production", call("fp8_e4m3:token_head", rows(64, 8))
    yield "odd dims", call("int8", rows(3, 1, 7))
    yield "odd dims, one scale", call("fp8_e5m2", rows(3, 3, 5))
    yield "transposed rows", call("mxfp4", make.randn(2, 5, 64).transpose(0, 1))
    yield "sliced rows", call("fp4_e2m1", rows(5, 2, 96)[..., 32:64])
    yield "expanded rows", call("nvfp4", rows(1, 2, 32).expand(4, -1, -1))
    yield (
        "far apart",
        call("mxfp8", rows(4) * torch.tensor([1e-7, 1e-3, 1.0, 300.0]).to(dtype).to(device)[:, None, None]),
    )
    broken = rows(32, 1, 64)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        broken[row::4, :, 5:9] = value
    broken[3] = torch.nan
    broken[7] = 0
    for name in (
        "int8",
        "fp8_e4m3:head",
        "fp8_e5m2:channel",
        "fp8_e4m3:32",
        "int4",
        "mxfp8",
        "mxfp4",
        "nvfp4",
        "fp4_e2m1",
    ):
        yield f"{name}, NaN and inf", call(name, broken)
