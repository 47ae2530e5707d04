"""Rows to codes and back in a few lines of torch, as one would write them for torch.compile: a peer of the codecs.

They divide, round and pack as the formats say, without what the codecs do about NaN, infinities and ties between
codes of int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs.grids import GRIDS
from ..formats import KVFormat

_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(
    x: Tensor, fmt: KVFormat, role: str, global_scale: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, ...]:
    """Codes of x [T, Hk, D] as they are stored, and scales as float32; a minimum too in KIVI's format."""
    numbers, dims = _spans(x.float(), fmt, role)
    if fmt.granularity == "kivi":
        low, high = numbers.amin(dims, keepdim=True), numbers.amax(dims, keepdim=True)
        step = ((high - low) / 15).half().float()
        return _packed(((numbers - low) / step).round().clamp(0, 15).byte().view(x.shape)), step, low
    divisor = _scales(numbers.abs().amax(dims, keepdim=True), fmt, global_scale) if scale is None else _over(scale, fmt)
    scaled = numbers / divisor
    largest = GRIDS[fmt.storage].largest
    if fmt.storage == "uint8":
        codes = torch.bucketize(scaled.abs(), torch.tensor(_MIDDLES)) | (scaled < 0).long() << 3
        return _packed(codes.byte().view(x.shape)), divisor
    if fmt.storage == "int8":
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(getattr(torch, fmt.storage)).view(x.shape), divisor


def decode(codes: Tensor, scales: Tensor, fmt: KVFormat, role: str, global_scale: Tensor | None) -> Tensor:
    """Rows [T, Hk, D] in bfloat16 of codes and scales as `quantize_kv` gives them."""
    if fmt.storage == "uint8":
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        if fmt.granularity == "kivi":
            steps, lows = (part.float().unsqueeze(1 if role == "key" else -1) for part in scales.unbind(-1))
            return (_spans(nibbles.float(), fmt, role)[0] * steps + lows).bfloat16().view(nibbles.shape)
        numbers = torch.tensor(_VALUES)[(nibbles & 7).long()] * torch.where(nibbles > 7, -1.0, 1.0)
    else:
        numbers = codes.float()
    values = _spans(numbers, fmt, role)[0] * _over(scales, fmt)
    if global_scale is not None:
        values = values * global_scale
    return values.bfloat16().view(numbers.shape)


def _spans(x: Tensor, fmt: KVFormat, role: str) -> tuple[Tensor, tuple[int, ...]]:
    """x with dims for groups, and which dims a scale covers."""
    if fmt.group is None:
        return x, {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,), "token_head": (2,)}[fmt.granularity]
    if fmt.granularity == "kivi" and role == "key":
        return x.unflatten(0, (-1, fmt.group)), (1,)
    return x.unflatten(-1, (-1, fmt.group)), (3,)


def _scales(amax: Tensor, fmt: KVFormat, global_scale: Tensor | None) -> Tensor:
    grid = GRIDS[fmt.storage]
    if fmt.rule == "amax":
        return amax / grid.largest
    if fmt.rule == "ocp_floor":
        return torch.exp2(amax.log2().floor() - grid.emax)
    if fmt.rule == "pow2_ceil":
        return torch.exp2((amax / grid.largest).log2().ceil())
    whole = 1.0 if global_scale is None else global_scale
    return (amax / (grid.largest * whole)).to(torch.float8_e4m3fn).float() * whole


def _over(scales: Tensor, fmt: KVFormat) -> Tensor:
    """Stored scales as float32, shaped to be spread over what they cover."""
    if fmt.scale_dtype == "float8_e8m0fnu":
        scales = torch.exp2(scales.view(torch.uint8).float() - 127)
    return scales.float() if fmt.granularity in ("tensor", "channel") else scales.float().unsqueeze(-1)


def _packed(codes: Tensor) -> Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4
