"""Read codes and scales of a KV format as numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float32, Rows, need, one_of
from ..codecs import split
from ..facts import fact
from ..spec import op
from . import _checks
from ._samples import Maker
from .quantize_kv import every_format

_OUT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@op(group="formats", exact=True)
def dequantize_kv(
    codes: Rows[Tensor, "T Hk C"],
    scales: Rows[Tensor, "*scales"],
    kv_format: str,
    global_scale: Float32[Tensor, "1"] | None = None,
    role: str = "key",
    out_dtype: str = "bf16",
) -> Tensor:
    """Read codes and scales, as quantize_kv gives them, back as numbers.

    codes         [T, Hk, C] in the format's storage dtype, any strides; C is the head dim, for 4-bit codes half of it
    scales        in the shape and dtype that quantize_kv gives for `kv_format`; any strides
    kv_format     the format, granularity and group they were written in
    global_scale  [1], the second multiplier of "nvfp4", which needs it
    role          "key" or "value": which way the groups of "int4" lie
    out_dtype     "fp32", "bf16" or "fp16"
    Returns x [T, Hk, D] in out_dtype: code * scale in float32, then * global_scale or + minimum, rounded once to
    out_dtype (in fp16, past 65504, to inf). A NaN scale or code gives NaN.
    Source: the formats' own definitions, see quantize_kv.
    """
    return split.decode(codes, scales, kv_format, role, global_scale, _OUT[out_dtype])


@dequantize_kv.check
def _(codes, scales, kv_format, global_scale, role, out_dtype, **_):
    need(
        out_dtype in _OUT,
        f"out_dtype is {out_dtype!r}; it must be {one_of(_OUT)}: choose one",
    )
    fmt = formats.get(kv_format)
    split.check_arguments(fmt, role, global_scale)
    split.check_dtypes(fmt, codes, scales)
    head_dim = codes.shape[2] * split.per_byte(fmt)
    split.check_head_dim(fmt, role, head_dim)
    if split.across_tokens(fmt, role):
        rest = fact(f"codes.shape[0] % {fmt.group}", codes=codes)
        split.check_rest(fmt, rest, "codes", "pass all codes of each group")
    shape = split.scales_shape(fmt, role, (0, codes.shape[1], head_dim))
    if fmt.quantized and fmt.granularity not in split.STATIC:
        tokens = f"codes.shape[0] // {fmt.group}" if split.across_tokens(fmt, role) else "codes.shape[0]"
        shape = (tokens, *shape[1:])
    _checks.shape_is("scales", scales, shape, split.shape_text(fmt), codes=codes)


@dequantize_kv.values
def _(global_scale, **_):
    if global_scale is not None:
        _checks.positive("global_scale", global_scale)


@dequantize_kv.fake
def _(codes, kv_format, out_dtype, **_):
    head_dim = codes.shape[2] * split.per_byte(formats.get(kv_format))
    return codes.new_empty((*codes.shape[:2], head_dim), dtype=_OUT[out_dtype])


@dequantize_kv.samples
def _(device, dtype):
    out_dtype = next(name for name, found in _OUT.items() if found is dtype)
    make = Maker(torch.device("cpu"), torch.float32)

    def call(
        kv_format: str, num_tokens: int, kv_heads: int = 2, head_dim: int = 128, role: str = "key"
    ) -> dict[str, Any]:
        global_scale = torch.tensor([0.002]) if formats.get(kv_format).global_scale else None
        rows = make.randn(num_tokens, kv_heads, head_dim)
        codes, scales = split.encode(rows, kv_format, role, global_scale)
        tensors = dict(codes=codes.to(device), scales=scales.to(device))
        if global_scale is not None:
            tensors["global_scale"] = global_scale.to(device)
        return dict(**tensors, kv_format=kv_format, role=role, out_dtype=out_dtype)

    yield "int8", call("int8", 13)
    yield "int4 values", call("int4", 3, role="value")
    yield "fp4_e2m1:channel", call("fp4_e2m1:channel", 5)
    for kv_format, role in every_format():
        by_tokens = kv_format.startswith("int4") and role == "key"
        yield f"{kv_format} {role}", call(kv_format, 128 if by_tokens else 5, role=role)
        yield f"{kv_format} {role}, no tokens", call(kv_format, 0, role=role)
    yield "production", call("fp8_e4m3:token_head", 64, 8)
    yield "odd dims", call("int8", 3, 1, 7)
    every_code = torch.arange(256, dtype=torch.uint8).reshape(2, 2, 64).to(device)
    bytes_as = {"codes": every_code, "role": "key", "out_dtype": out_dtype}
    scale = torch.tensor([[0.5, 3.0], [1e-6, 7.25]]).to(device)
    yield "every int8 code", dict(bytes_as, codes=every_code.view(torch.int8), scales=scale, kv_format="int8")
    for name in ("fp8_e4m3", "fp8_e5m2"):
        codes = every_code.view(getattr(torch, formats.get(name).storage))
        yield f"every code of {name}", dict(bytes_as, codes=codes, scales=scale[0, :1], kv_format=name)
    # 64 scales, which with one group of 32 channels to a token and head are every fourth exponent, and NaN
    exponents = (torch.arange(64, dtype=torch.uint8) * 4 + 3).reshape(32, 2, 1).to(device).view(torch.float8_e8m0fnu)
    codes = torch.arange(16, dtype=torch.uint8).mul(17).expand(32, 2, 16).to(device)
    yield "every code of mxfp4", dict(bytes_as, codes=codes, scales=exponents, kv_format="mxfp4")
    wide = call("mxfp8", 6)
    yield "strided", wide | {"codes": wide["codes"][::2], "scales": wide["scales"][::2]}
