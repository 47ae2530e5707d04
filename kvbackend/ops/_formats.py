"""One cache of a call and the scales that belong to it: checked, written and read in its KV format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import need
from ..codecs import split
from ..formats import KVFormat
from . import _math

PER_TOKEN = ("token_head", "group", "kivi")  # granularities whose scales are paged beside the codes


@dataclass(frozen=True)
class Cached:
    """A key, value or latent cache of a call.

    name, scale_name, scale_cache_name   the arguments, as the caller wrote them
    cache        [nb, bs, Hk, width] of the format's storage, or [nb, bs, width] where all heads share a row
    scale        a static scale, or nvfp4's global one
    scale_cache  [nb, bs, Hk(, groups)] scales of each token, or without Hk as the cache
    kv_format    the name of this cache's own format
    role         "key" or "value": which way KIVI's groups lie
    """

    name: str
    cache: Any
    kv_format: str
    scale_name: str = "k_scale"
    scale: Any = None
    scale_cache_name: str = "k_scale_cache"
    scale_cache: Any = None
    role: str = "key"

    @property
    def format(self) -> KVFormat | None:
        """None for "auto": the cache reads as its dtype says."""
        return None if self.kv_format == "auto" else formats.get(self.kv_format)

    @property
    def quantized(self) -> bool:
        fmt = self.format
        return fmt is not None and fmt.quantized

    def width(self) -> Any:
        """Numbers in a row: head_dim, or the width of a latent."""
        fmt = self.format
        return self.cache.shape[-1] * (2 if fmt is not None and fmt.bits == 4 else 1)

    def row_shape(self) -> tuple[Any, ...]:
        """Shape of one row, decoded."""
        row = tuple(self.cache.shape[2:])
        return (*row[:-1], self.width()) if self.quantized else row

    # ------------------------------------------------------------------------------------------------------- check

    def check(self, like_name: str, like: Any, width: Any = None, writes: bool = False) -> None:
        """Dtypes, widths and scales. `like` are the rows or queries; `width` what a row must have, if known."""
        fmt = self.format
        need(
            width is None or self.width() == width,
            f"{self.name} holds rows of {self.width()} numbers in format {self.kv_format}; {like_name} needs {width}: "
            f"allocate the cache for this head_dim",
        )
        if fmt is None or not fmt.quantized:
            self._check_plain(fmt, like_name, like)
        else:
            self._check_quantized(fmt, writes)

    def _check_plain(self, fmt: KVFormat | None, like_name: str, like: Any) -> None:
        for name, tensor in ((self.scale_name, self.scale), (self.scale_cache_name, self.scale_cache)):
            need(
                tensor is None,
                f"{name} is given but kv_format {self.kv_format!r} has no scale; scales belong to quantized formats: "
                f"drop {name} or choose such a format",
            )
        need(
            fmt is None or self.cache.dtype == split.storage(fmt),
            f"{self.name} is {self.cache.dtype}; kv_format {self.kv_format!r} reads {fmt and split.storage(fmt)}: pass "
            f"'auto' or allocate the cache in that dtype",
        )
        need(
            self.cache.dtype == like.dtype,
            f"{self.name} is {self.cache.dtype} but {like_name} is {like.dtype}; without a quantized kv_format they "
            f"must be of one dtype: convert one of them",
        )

    def _check_quantized(self, fmt: KVFormat, writes: bool) -> None:
        need(
            self.cache.dtype == split.storage(fmt),
            f"{self.name} is {self.cache.dtype}; kv_format {self.kv_format!r} stores {split.storage(fmt)}: allocate "
            f"the cache in that dtype",
        )
        need(
            not (writes and fmt.granularity == "kivi" and self.role == "key"),
            f"kv_format {self.kv_format!r} shares key scales across tokens, so single rows cannot be written; "
            f"kvbackend.cache writes a group of {fmt.group} tokens when it is full: use PagedCache or another format",
        )
        wants_scale = fmt.global_scale or fmt.granularity in split.STATIC
        for name, tensor, wanted in (
            (self.scale_name, self.scale, wants_scale),
            (self.scale_cache_name, self.scale_cache, fmt.granularity in PER_TOKEN),
        ):
            how = "one for the whole tensor" if fmt.global_scale and name == self.scale_name else fmt.granularity
            need(
                tensor is not None or not wanted,
                f"{name} is None; kv_format {self.kv_format!r} has scales ({how}): pass {name}",
            )
            need(
                tensor is None or wanted,
                f"{name} is given; kv_format {self.kv_format!r} has no such scale: drop {name}",
            )
        shape = list(self.cache.shape)
        rows = [shape[1], 1 if len(shape) == 3 else shape[2], self.width()]
        if self.scale is not None:
            wanted_shape = (1,) if fmt.global_scale else split.scales_shape(fmt, self.role, rows)
            self._check_shape(self.scale_name, self.scale, wanted_shape, fmt)
        if self.scale_cache is not None:
            split.check_head_dim(fmt, self.role, rows[2])
            need(
                not split.across_tokens(fmt, self.role) or rows[0] % (fmt.group or 1) == 0,
                f"{self.name} has blocks of {rows[0]} tokens; kv_format {self.kv_format!r} shares key scales across "
                f"{fmt.group}, so block_size must be a multiple of that: choose another block_size",
            )
            need(
                self.scale_cache.dtype == split.scale_dtype(fmt),
                f"{self.scale_cache_name} is {self.scale_cache.dtype}; kv_format {self.kv_format!r} has scales in "
                f"{split.scale_dtype(fmt)}: allocate it in that dtype",
            )
            page = split.scales_shape(fmt, self.role, rows)
            page = page if len(shape) == 4 else (page[0], *page[2:])  # a latent cache has no dim of heads
            self._check_shape(self.scale_cache_name, self.scale_cache, (shape[0], *page), fmt)

    def _check_shape(self, name: str, tensor: Any, wanted: tuple[Any, ...], fmt: KVFormat) -> None:
        message = (
            f"{name} has shape {list(tensor.shape)}; kv_format {self.kv_format!r} (scales per {fmt.granularity}) has "
            f"{list(wanted)}: pass scales of that granularity or choose the format that has these"
        )
        need(tensor.ndim == len(wanted), message)
        for got, size in zip(tensor.shape, wanted, strict=True):
            need(got == size, message)

    # ---------------------------------------------------------------------------------------------- write and read

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows [N, Hk, width], or [N, width] to a latent cache, to their slots."""
        fmt = self.format
        if fmt is None or not fmt.quantized:
            _math.write_rows(self.cache, slots, rows)
            return
        latent = self.cache.dim() == 3
        codes, scales = split.encode(rows[:, None] if latent else rows, fmt, self.role, *self._scales(fmt))
        _math.write_rows(self.cache, slots, codes[:, 0] if latent else codes)
        if self.scale_cache is not None:
            _math.write_rows(self.scale_cache, slots, scales[:, 0] if latent else scales)

    def gather(self, block_table: Tensor, length: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One sequence's rows in `dtype`, and which exist: as _math.gather_rows, with the codes decoded."""
        fmt = self.format
        rows, exists = _math.gather_rows(self.cache, block_table, length)
        if fmt is None or not fmt.quantized:
            return rows.to(dtype), exists
        scales = self.scale
        if self.scale_cache is not None:
            per_row = self.cache.shape[1] // max(self.scale_cache.shape[1], 1)  # tokens of a key group in KIVI, else 1
            scales, _ = _math.gather_rows(self.scale_cache, block_table, length // max(per_row, 1))
        return self.decode(rows, scales).to(dtype).masked_fill(~_math.expand(exists, rows), 0), exists

    def rows_at(self, slots: Tensor) -> Tensor:
        """Rows [N, *row] of slots that are all in the cache; decoded to float32 where they are codes."""
        block, offset = slots // self.cache.shape[1], slots % self.cache.shape[1]
        if not self.quantized:
            return self.cache[block, offset]
        scales = self.scale
        if self.scale_cache is not None:
            scales = _math.as_bytes(self.scale_cache)[block, offset].view(self.scale_cache.dtype)
        return self.decode(_math.as_bytes(self.cache)[block, offset].view(self.cache.dtype), scales)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows of codes [N, Hk, width] or [N, width], with their scales, as float32."""
        fmt = self.format
        assert fmt is not None
        latent = self.cache.dim() == 3
        if latent:
            codes = codes[:, None]
            scales = scales[:, None] if self.scale_cache is not None else scales
        global_scale = self.scale if fmt.global_scale else None
        rows = split.decode(codes, scales, fmt, self.role, global_scale)
        return rows[:, 0] if latent else rows

    def _scales(self, fmt: KVFormat) -> tuple[Tensor | None, Tensor | None]:
        """(global_scale, scale) as split.encode takes them."""
        return (self.scale, None) if fmt.global_scale else (None, self.scale)


def caches(
    key_cache: Any,
    value_cache: Any,
    kv_format: str,
    k_scale: Any,
    v_scale: Any,
    k_scale_cache: Any,
    v_scale_cache: Any,
) -> tuple[Cached, Cached]:
    """Keys and values of a call whose kv_format may name a format for each: "int8/fp8_e4m3"."""
    return keys(key_cache, kv_format, k_scale, k_scale_cache), values(value_cache, kv_format, v_scale, v_scale_cache)


def keys(key_cache: Any, kv_format: str, k_scale: Any, k_scale_cache: Any) -> Cached:
    """The keys of such a call alone."""
    key_format, _ = formats.pair(kv_format)
    return Cached("key_cache", key_cache, key_format, "k_scale", k_scale, "k_scale_cache", k_scale_cache)


def values(value_cache: Any, kv_format: str, v_scale: Any = None, v_scale_cache: Any = None) -> Cached:
    """The values alone; without their scales, for their width."""
    _, value_format = formats.pair(kv_format)
    return Cached("value_cache", value_cache, value_format, "v_scale", v_scale, "v_scale_cache", v_scale_cache, "value")


def latent(kv_format: str, ckv_cache: Any, kpe_cache: Any, k_scale: Any, k_scale_cache: Any) -> tuple[Cached, Cached]:
    """Latent and rotary part of MLA. The rotary part is small and sensitive, so only the latent is ever quantized."""
    fmt = Cached("ckv_cache", ckv_cache, kv_format, "k_scale", k_scale, "k_scale_cache", k_scale_cache)
    return fmt, Cached("kpe_cache", kpe_cache, "auto" if fmt.quantized else kv_format)
