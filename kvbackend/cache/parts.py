"""One of the two caches of a layer: the shape of its rows, the format they are stored in, and the bytes of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import formats
from ..codecs import split
from ..errors import ArgumentError
from ..formats import KVFormat
from ..layouts import allocate_kv, empty_pages

# Formats whose static scale may be left out. A float8 is a sound number by itself, up to 448 or 57344, and nvfp4's
# blocks scale themselves, up to 2688; a 4-bit code without a scale is not.
ONES = ("fp8_e4m3", "fp8_e5m2", "nvfp4")


@dataclass(frozen=True)
class Part:
    """A key or value cache [num_blocks, block_size, heads, dim], or MLA's latent or rotary one, without heads.

    scale_name   the ops' argument for its static scale: "k_scale" or "v_scale"
    heads        kv heads; None: one row for all heads
    dim          numbers of a row of one head
    format       how they are stored
    """

    scale_name: str
    heads: int | None
    dim: int
    format: KVFormat

    @property
    def role(self) -> str:
        """Whether its rows are keys or values: KIVI's groups lie along tokens of keys and along channels of values."""
        return "value" if self.scale_name == "v_scale" else "key"

    @property
    def storage(self) -> torch.dtype:
        """The dtype of its pages."""
        return split.storage(self.format)

    @property
    def width(self) -> int:
        """Elements of a row of one head: two 4-bit codes are one."""
        return self.dim // split.per_byte(self.format)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's codes and of the scales that come with it; raises ArgumentError if dim does not fit."""
        return self.format.bytes_per_token(self.heads or 1, self.dim)

    @property
    def fixed_scale_bytes(self) -> int:
        """Bytes of the scales that the cache has once."""
        return self.format.fixed_scale_bytes(self.heads or 1, self.dim)

    def check_block_size(self, block_size: int) -> None:
        """Raise ArgumentError where blocks of so many tokens would cut groups of tokens that share scales."""
        if split.across_tokens(self.format, self.role) and block_size % (self.format.group or 1):
            raise ArgumentError(
                f"block_size is {block_size}; keys in {self.format} share scales across {self.format.group} tokens, so "
                f"a block must be a multiple of that: pass {self.format.group}, or choose a smaller group"
            )

    def static_scale(self, given: Tensor | None) -> Tensor | None:
        """The static scale in float32, as the format has it: a copy of the one given, or ones; None if it has none."""
        fmt, name = self.format, self.scale_name
        if not fmt.global_scale and fmt.granularity not in split.STATIC:
            if given is not None:
                raise ArgumentError(
                    f"scales has {name}; kv_format {str(fmt)!r} has no such scale, it stores scales with every token "
                    f"or none: leave {name} out"
                )
            return None
        shape = (1,) if fmt.global_scale else split.scales_shape(fmt, self.role, (self.heads or 1, self.dim))
        if given is None:
            if fmt.name not in ONES:
                raise ArgumentError(
                    f"scales has no {name}; kv_format {str(fmt)!r} needs one of shape {list(shape)}, from calibration: "
                    f"pass it, or choose {fmt.name!r}, which computes its scales"
                )
            return torch.ones(shape)
        if tuple(given.shape) != shape or not given.is_floating_point():
            raise ArgumentError(
                f"{name} in scales is {given.dtype} of shape {list(given.shape)}; kv_format {str(fmt)!r} has scales of "
                f"shape {list(shape)}: pass these as float32"
            )
        if not bool((given.isfinite() & (given > 0)).all()):
            raise ArgumentError(
                f"{name} in scales has numbers that are not positive and finite; they multiply codes: calibrate again"
            )
        return given.detach().to(torch.float32, copy=True)

    def pages(self, num_blocks: int, block_size: int, device: torch.device, layout: str) -> Tensor:
        """Pages of its own, not initialized."""
        if self.heads is None:
            return empty_pages(num_blocks, block_size, self.width, dtype=self.storage, device=device)
        sizes = num_blocks, block_size, self.heads, self.width, 0  # no bytes of values
        return allocate_kv(*sizes, dtype=self.storage, device=device, layout=layout)[0]

    def scale_pages(self, num_blocks: int, block_size: int, device: torch.device) -> Tensor | None:
        """Pages of the scales that come with every token, dense in any layout; None if the format has none."""
        if not self.format.quantized or self.format.granularity in split.STATIC:
            return None
        page = split.scales_shape(self.format, self.role, (block_size, self.heads or 1, self.dim))
        page = page if self.heads is not None else (page[0], *page[2:])  # the ops' latent caches have no dim of heads
        return empty_pages(num_blocks, *page, dtype=split.scale_dtype(self.format), device=device)


def format_of(name: str, dtype: torch.dtype) -> KVFormat:
    """The format called `name` in a cache for rows of `dtype`; raises ArgumentError for one that pages cannot have."""
    own = formats.of_dtype(str(dtype))
    fmt = own if name == "auto" else formats.get(name)
    if not fmt.quantized and fmt != own:
        raise ArgumentError(
            f"kv_format is {name!r} but dtype is {dtype}; without codes a cache has the dtype of its rows: pass "
            f"'auto', or dtype torch.{fmt.storage}"
        )
    return fmt


def formats_of(kv_format: str, dtype: torch.dtype) -> tuple[KVFormat, KVFormat]:
    """The formats of keys and of values that a kv_format names."""
    key, value = formats.pair(kv_format)
    return format_of(key, dtype), format_of(value, dtype)


def is_quantized(kv_format: str) -> bool:
    """Whether a name of `formats.pair` stands for codes on either side."""
    return any(side != "auto" and formats.get(side).quantized for side in formats.pair(kv_format))


def usable(device: torch.device | str) -> torch.device:
    """The device with its index; raises ArgumentError where torch cannot use it."""
    try:
        return torch.zeros(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch's ways of saying that there is no such device
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"device is {str(device)!r}; torch cannot use it here ({reason}): pass cpu") from error
