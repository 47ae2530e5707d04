"""Rows of a split cache in a format: codes in one tensor, scales in another.

Shape of the scales, by granularity: one dim for each thing that has scales of its own, so static ones have no tokens
and those of tokens start as the rows do.

    tensor [1]   head [Hk]   channel [Hk, D]   token_head [..., Hk]   group [..., Hk, D / group]
    kivi   keys [..., T / group, Hk, D, 2], values [..., T, Hk, D / group, 2]; the last dim is scale, minimum
    none   [0]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import need, one_of
from ..formats import KVFormat
from . import grids
from .grids import GRIDS, LARGEST_FLOAT16

STATIC = ("tensor", "head", "channel")  # granularities whose scales can be known before the tokens are
ROLES = ("key", "value")


def encode(
    x: Tensor,
    fmt: KVFormat | str,
    role: str = "key",
    global_scale: Tensor | None = None,
    scale: Tensor | None = None,
    floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows in a format.

    x             [..., T, Hk, D], any float dtype, any strides
    fmt           a format or its name
    role          "key" or "value": which way the groups of KIVI's int4 lie; other formats do not ask
    global_scale  [1] float32 of nvfp4, which must have one (see `global_scale_of`); other formats take none
    scale         float32 of a format with scales per tensor, head or channel; None: computed from x
    floor         the smallest amax that a computed scale is made for; None: the rule's own. DeepSeek's FP8 rule has
                  1e-4; FlashMLA's tests and SGLang hold amax / 448 at 1e-4 or more, which is floor=0.0448
    Returns codes [..., T, Hk, D], or [..., T, Hk, D / 2] uint8 for 4 bits, and the scales: shapes above.
    NaN and infinities: see the package. Undefined: a given scale that is not positive and finite.
    Source: OCP MX 1.0; KIVI (arXiv 2402.02750), section 3 and its quant/new_pack.py; NVFP4; DeepSeek-V4.1 (arXiv
    2609.19969); vLLM 0.33's per-token-head caches.
    """
    fmt = as_format(fmt)
    check_arguments(fmt, role, global_scale, scale)
    check_head_dim(fmt, role, x.shape[-1])
    if across_tokens(fmt, role):
        assert fmt.group is not None
        check_rest(fmt, x.shape[-3] % fmt.group)
    if scale is not None:
        _check_shape("scale", scale.shape, scales_shape(fmt, role, x.shape), fmt)
    need(floor is None or floor > 0, f"floor is {floor}; it must be positive, or 0 / 0 is met: pass the smallest amax")
    if not fmt.quantized:
        return x.to(storage(fmt), copy=True), x.new_empty(0, dtype=scale_dtype(fmt))
    x = grids.without_nan(x)
    if fmt.granularity == "kivi":
        return _encode_kivi(x, fmt, role)
    grid = GRIDS[fmt.storage]
    amax = _amax(x, fmt)
    if global_scale is not None:
        x, amax = x / global_scale, amax / global_scale
    scales = grids.make_scales(amax, grid, fmt.rule, floor) if scale is None else scale.clone()
    return grid.codes(x / _spread(grids.scale_values(scales), fmt, role)), scales


def decode(
    codes: Tensor,
    scales: Tensor,
    fmt: KVFormat | str,
    role: str = "key",
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows [..., T, Hk, D] back from codes and scales as `encode` gives them, in `dtype`.

    Computed in float32 (code * scale, then * global_scale or + minimum) and rounded to `dtype` once. A scale that is
    NaN makes what it covers NaN.
    """
    fmt = as_format(fmt)
    check_arguments(fmt, role, global_scale)
    check_dtypes(fmt, codes, scales)
    rows = (*codes.shape[:-1], codes.shape[-1] * per_byte(fmt))
    check_head_dim(fmt, role, rows[-1])
    _check_shape("scales", scales.shape, scales_shape(fmt, role, rows), fmt)
    if not fmt.quantized:
        return codes.to(dtype, copy=True)
    if fmt.granularity == "kivi":
        step, low = (_spread(part.to(torch.float32), fmt, role) for part in scales.unbind(-1))
        return (grids.unpack_nibbles(codes) * step + low).to(dtype)
    x = GRIDS[fmt.storage].values(codes) * _spread(grids.scale_values(scales), fmt, role)
    return (x if global_scale is None else x * global_scale).to(dtype)


def global_scale_of(x: Tensor) -> Tensor:
    """NVFP4's global scale [1] float32 for data like x: amax / (448 * 6), with which no block's scale passes 448.

    1 where x is all zero. Source: NVIDIA NVFP4 (Transformer Engine, ModelOpt).
    """
    scale = grids.divide(_all_of(grids.magnitude(grids.without_nan(x))), 448.0 * 6.0)
    return scale.masked_fill(scale == 0, 1.0)


def storage(fmt: KVFormat) -> torch.dtype:
    """The dtype of a format's codes."""
    dtype: torch.dtype = getattr(torch, fmt.storage)
    return dtype


def scale_dtype(fmt: KVFormat) -> torch.dtype:
    """The dtype of a format's scales; float32, of none, where it has none."""
    dtype: torch.dtype = getattr(torch, fmt.scale_dtype or "float32")
    return dtype


def codes_shape(fmt: KVFormat, rows: Any) -> tuple[Any, ...]:
    """Shape of the codes for rows of shape [..., T, Hk, D]."""
    return (*rows[:-1], rows[-1] // per_byte(fmt))


def per_byte(fmt: KVFormat) -> int:
    """Codes in one element of storage."""
    return 2 if fmt.bits == 4 else 1


def across_tokens(fmt: KVFormat, role: str) -> bool:
    """Whether a scale covers a group of tokens."""
    return fmt.granularity == "kivi" and role == "key"


def scales_shape(fmt: KVFormat, role: str, rows: Any) -> tuple[Any, ...]:
    """Shape of the scales for rows of shape [..., T, Hk, D]."""
    granularity, group = fmt.granularity, fmt.group
    if granularity in ("none", "tensor"):
        return (1 if fmt.quantized else 0,)
    if granularity == "head":
        return (rows[-2],)
    if granularity == "channel":
        return (rows[-2], rows[-1])
    if granularity == "token_head":
        return tuple(rows[:-1])
    assert group is not None
    if granularity == "group":
        return (*rows[:-1], rows[-1] // group)
    if across_tokens(fmt, role):
        return (*rows[:-3], rows[-3] // group, rows[-2], rows[-1], 2)
    return (*rows[:-1], rows[-1] // group, 2)


# -------------------------------------------------------------------------------------------------- inside encode


def _amax(x: Tensor, fmt: KVFormat) -> Tensor:
    """The largest magnitude under each scale of a format, in the shape of its scales."""
    x = grids.magnitude(x)
    if fmt.granularity == "group":
        assert fmt.group is not None
        return x.unflatten(-1, (x.shape[-1] // fmt.group, fmt.group)).amax(-1)
    if fmt.granularity == "token_head":
        return x.amax(-1)
    if fmt.granularity == "tensor":
        return _all_of(x)
    x = x.flatten(0, -3)  # [T, Hk, D]
    x = x.amax(0) if x.shape[0] else x.sum(0)  # no tokens: zeros
    return x if fmt.granularity == "channel" else x.amax(-1)


def _all_of(x: Tensor) -> Tensor:
    return (x.amax() if x.numel() else x.sum()).reshape(1)


def _spread(scales: Tensor, fmt: KVFormat, role: str) -> Tensor:
    """Scales in a shape that broadcasts with the rows."""
    if fmt.granularity in ("head", "token_head"):
        return scales[..., None]
    if fmt.group is not None:
        return scales.repeat_interleave(fmt.group, -3 if across_tokens(fmt, role) else -1)
    return scales


def _encode_kivi(x: Tensor, fmt: KVFormat, role: str) -> tuple[Tensor, Tensor]:
    """KIVI's asymmetric int4: code = round((x - minimum) / scale) with the scale and minimum that are stored."""
    x = x.clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16)
    dim = -3 if role == "key" else -1
    assert fmt.group is not None
    groups = x.unflatten(dim, (x.shape[dim] // fmt.group, fmt.group))
    minimum, maximum = groups.amin(dim), groups.amax(dim)
    step = grids.divide(maximum - minimum, 15.0).half()
    low = (minimum + 0.0).half()  # never -0, which is no less than 0
    step = step.masked_fill(step == 0, 1.0)  # all equal, or apart by less than float16 tells
    codes = (x - _spread(low.float(), fmt, role)) / _spread(step.float(), fmt, role)
    return grids.pack_nibbles(codes.clamp(0, 15).round().to(torch.uint8)), torch.stack((step, low), -1)


# -------------------------------------------------------------------------------------------------------- refusals


def as_format(fmt: KVFormat | str) -> KVFormat:
    """The format, by name where a name is given."""
    return formats.get(fmt) if isinstance(fmt, str) else fmt


def check_arguments(fmt: KVFormat, role: str, global_scale: Any, scale: Any = None) -> None:
    """What a format needs, and takes, besides rows."""
    need(role in ROLES, f"role is {role!r}; it must be {one_of(ROLES)}: say which cache the rows are of")
    need(
        not fmt.global_scale or global_scale is not None,
        f"global_scale is None; {fmt} needs one, from calibration: pass amax / 2688 of data like these",
    )
    need(
        fmt.global_scale or global_scale is None,
        f"global_scale is given but kv_format {str(fmt)!r} has none; only nvfp4 has one: drop it or choose nvfp4",
    )
    need(
        scale is None or fmt.granularity in STATIC,
        f"scale is given but kv_format {str(fmt)!r} computes its scales from the rows; only scales per "
        f"{one_of(STATIC)} can be given: drop scale or choose such a format",
    )


def check_head_dim(fmt: KVFormat, role: str, head_dim: Any) -> None:
    """Whole bytes, and whole groups where groups lie along channels."""
    need(
        fmt.bits * head_dim % 8 == 0,
        f"head_dim is {head_dim}; {fmt} packs two codes into a byte, so it must be even: pad it or choose 8 bits",
    )
    if fmt.group is not None and not across_tokens(fmt, role):
        need(
            head_dim % fmt.group == 0,
            f"head_dim is {head_dim}; {fmt} needs a multiple of its group of {fmt.group} channels: choose a group "
            f"that divides head_dim or a scale per token",
        )


def check_rest(
    fmt: KVFormat, rest: Any, name: str = "x", hint: str = "keep an unfilled group in full precision"
) -> None:
    """No tokens are left over by groups of tokens."""
    need(
        rest == 0,
        f"{name} has {rest} tokens more than whole groups; keys in {fmt} share scales across {fmt.group} tokens, so "
        f"there must be a multiple of that: {hint}",
    )


def check_dtypes(fmt: KVFormat, codes: Any, scales: Any) -> None:
    """Codes and scales are stored as the format says."""
    for name, tensor, dtype in (("codes", codes, storage(fmt)), ("scales", scales, scale_dtype(fmt))):
        need(
            tensor.dtype is dtype,
            f"{name} is {tensor.dtype}; {fmt} stores {dtype}: pass what quantize_kv gave for the same kv_format",
        )


def shape_text(fmt: KVFormat) -> str:
    """The part of a message that says whose shape scales must have."""
    return f"{fmt}, with scales per {fmt.granularity}"


def _check_shape(name: str, got: torch.Size, wanted: tuple[int, ...], fmt: KVFormat) -> None:
    need(
        tuple(got) == wanted,
        f"{name} has shape {list(got)}; {shape_text(fmt)}, takes {list(wanted)}: pass scales of that granularity or "
        f"choose the format that has these",
    )
