"""A cache of a call as the kernels take it: codes, scales, strides, and how they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...codecs import grids, split
from ...formats import KVFormat
from ...ops._formats import Cached
from . import launching

CODES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8", "uint8": "e2m1"}
SCALES = {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"} | {
    name: name for name in ("bfloat16", "float16", "float32")
}


def code_name(fmt: KVFormat) -> str:
    """CODE of triton/codecs.py."""
    return "int4" if fmt.granularity == "kivi" else CODES[fmt.storage]


def bytes_of(tensor: Tensor) -> Tensor:
    """Numbers of a byte as uint8; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@dataclass(frozen=True)
class Operand:
    """The arguments of one cache in the order of the kernels: `codes, code_b .. code_d`, then `scales, scale_b ..`.

    rows        codes, and their strides by block, row of the block, head and channel
    scales      scales, and their strides by block, row, head, channel (group) and part, and the tokens that share one
    number      the global scale, or any tensor where there is none
    constants   CODE, SCALE, GROUP, GLOBAL
    """

    rows: tuple[Any, ...]
    scales: tuple[Any, ...]
    number: Tensor
    constants: dict[str, Any]

    @property
    def quantized(self) -> bool:
        return bool(self.constants["CODE"])

    def prefixed(self, prefix: str) -> dict[str, Any]:
        """The constants with a prefix, for kernels that take two caches."""
        return {f"{prefix}_{name}": value for name, value in self.constants.items()}


def plain(cache: Tensor) -> Operand:
    """A cache [nb, bs, Hk, D] that reads as its dtype says."""
    constants = dict(CODE="", SCALE="", GROUP=0, GLOBAL=False)
    return Operand((cache, *cache.stride()), (cache, 0, 0, 0, 0, 0, 1), cache, constants)


def operand(cached: Cached) -> Operand:
    """The cache of a call, [nb, bs, Hk, width], or [nb, bs, width] as one head."""
    cache, fmt = cached.cache, cached.format
    latent = cache.dim() == 3
    cache = cache.unsqueeze(2) if latent else cache
    if fmt is None or not fmt.quantized:
        return plain(cache)
    scales = cached.scale if cached.scale_cache is None else cached.scale_cache
    if latent and cached.scale_cache is not None:
        scales = scales.unsqueeze(2)
    tokens = cache.shape[1] // max(scales.shape[1], 1) if fmt.granularity == "kivi" else 1
    number = cached.scale if fmt.global_scale else scales
    return quantized(cache, scales, number, fmt, cached.role, tokens)


def quantized(
    codes: Tensor, scales: Tensor, number: Tensor, fmt: KVFormat, role: str, scale_tokens: int = 1
) -> Operand:
    """Codes [nb, bs, Hk, width] and their scales, in the shape that `split` gives them for rows [nb, bs, Hk, D]."""
    strides = dict(zip(_scale_dims(fmt, role), scales.stride(), strict=True))
    channels = 0 if fmt.granularity in ("tensor", "head", "token_head") else fmt.group or 1
    if split.across_tokens(fmt, role):
        channels = 1
    constants = dict(CODE=code_name(fmt), SCALE=SCALES[fmt.scale_dtype or ""], GROUP=channels, GLOBAL=fmt.global_scale)
    ordered = (strides.get(dim, 0) for dim in "bshdp")
    return Operand(
        (bytes_of(codes), *codes.stride()), (bytes_of(scales), *ordered, scale_tokens), bytes_of(number), constants
    )


def _scale_dims(fmt: KVFormat, role: str) -> str:
    """What each dim of the scales counts: block, row, head, channel or group, part."""
    by_granularity = {"tensor": "p", "head": "h", "channel": "hd", "token_head": "bsh", "group": "bshd"}
    if fmt.granularity == "kivi":
        return "bshdp"
    return by_granularity[fmt.granularity]


def encoding(fmt: KVFormat, head_dim: int, given: bool) -> dict[str, Any]:
    """The constants of write_encoded_rows that replace and join those of an operand."""
    grid = grids.GRIDS[fmt.storage]
    floor = {"pow2_ceil": grid.floor, "e4m3": grids.SMALLEST_E4M3_SCALE, "amax": grids.SMALLEST_SCALE}
    return dict(
        GROUP=fmt.group or launching.power_of_two(head_dim),
        LARGEST=grid.largest,
        EMAX=grid.emax,
        FLOOR=floor.get(fmt.rule, 0.0),
        RULE=fmt.rule,
        GIVEN=("channel" if fmt.granularity == "channel" else "row") if given else "",
    )
