"""What one layer keeps of a token, and its pages: keys and values of kv heads, or MLA's latent and rotary row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import formats, ops
from ..errors import ArgumentError
from ..layouts import LAYOUTS, allocate_kv, empty_pages
from ..typed import check_fields, need_sizes
from . import kivi
from .parts import Part, format_of, formats_of, is_quantized

Scales = Mapping[str, Tensor]


@dataclass(frozen=True)
class PageSizes:
    """What the pages of all layers of a cache have in common: arguments of PagedCache, which says what they mean."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    layout: str


@dataclass(frozen=True)
class GqaLayer:
    """A layer of multi-head, grouped-query or multi-query attention.

    kv_heads    heads that are cached, of one rank
    head_dim    width of a key, and of a value unless value_dim says otherwise
    """

    kv_heads: int
    head_dim: int
    value_dim: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        need_sizes(self, kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.value_width)

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def parts(self, dtype: torch.dtype, kv_format: str = "auto") -> tuple[Part, Part]:
        """Its key cache and its value cache for rows of `dtype`; raises ArgumentError for a format they cannot have."""
        key, value = formats_of(kv_format, dtype)
        return (
            Part("k_scale", self.kv_heads, self.head_dim, key),
            Part("v_scale", self.kv_heads, self.value_width, value),
        )

    def bytes_per_token(self, dtype: torch.dtype, kv_format: str = "auto") -> int:
        """Bytes of one token's keys and values, with the scales that come with it."""
        return sum(part.bytes_per_token for part in self.parts(dtype, kv_format))

    def check_layout(self, layout: str, dtype: torch.dtype, kv_format: str = "auto") -> None:
        """Raise ArgumentError if its pages cannot sit in memory like that."""
        _need_layout(layout)
        key, value = self.parts(dtype, kv_format)
        if layout == "interleaved" and (key.storage, key.width) != (value.storage, value.width):
            raise ArgumentError(
                f"layout is 'interleaved', which has one row size and one dtype; in kv_format {kv_format!r} a key is "
                f"{key.width} numbers of {key.storage} and a value {value.width} of {value.storage}: choose NHD or HND"
            )

    def allocate(self, sizes: PageSizes, kv_format: str = "auto", scales: Scales | None = None) -> GqaPages:
        """Pages that are not initialized; the layouts are those of `kvbackend.layouts`. Scales are dense in each."""
        num_blocks, block_size, device, layout = sizes.num_blocks, sizes.block_size, sizes.device, sizes.layout
        self.check_layout(layout, sizes.dtype, kv_format)
        parts = self.parts(sizes.dtype, kv_format)
        static = static_scales(self, sizes.dtype, kv_format, scales)
        key, value = parts
        if key.storage == value.storage:
            shape = num_blocks, block_size, self.kv_heads, key.width, value.width
            caches = allocate_kv(*shape, dtype=key.storage, device=device, layout=layout)
        else:
            caches = (
                key.pages(num_blocks, block_size, device, layout),
                value.pages(num_blocks, block_size, device, layout),
            )
        k_scale, v_scale = (None if scale is None else scale.to(device) for scale in static)
        k_scale_cache, v_scale_cache = (part.scale_pages(num_blocks, block_size, device) for part in parts)
        return GqaPages(*caches, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)


@dataclass(frozen=True)
class MlaLayer:
    """A layer of multi-head latent attention: one row for all heads, which is key and value.

    kv_lora_rank       width of the latent part
    qk_rope_head_dim   width of the rotary part
    """

    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        check_fields(self)
        need_sizes(self, kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim)

    def parts(self, dtype: torch.dtype, kv_format: str = "auto") -> tuple[Part, Part]:
        """Its latent cache, in kv_format, and its rotary one, small and sensitive, in `dtype` always."""
        if "/" in kv_format:
            raise ArgumentError(
                f"kv_format is {kv_format!r}; MLA's latent row is key and value, so it has one format: pass one name"
            )
        latent = format_of(kv_format, dtype)
        if latent.granularity == "kivi":
            raise ArgumentError(
                f"kv_format is {kv_format!r}, which scales keys per channel and values per token; MLA's latent row is "
                f"both: choose fp4_e2m1, mxfp4 or nvfp4 for 4 bits"
            )
        if latent.granularity == "channel":
            raise ArgumentError(
                f"kv_format is {kv_format!r}, with scales per channel; a latent cache takes one scale, or scales per "
                f"token: choose {latent.name} with tensor or a group after the colon"
            )
        return Part("k_scale", None, self.kv_lora_rank, latent), Part(
            "", None, self.qk_rope_head_dim, format_of("auto", dtype)
        )

    def bytes_per_token(self, dtype: torch.dtype, kv_format: str = "auto") -> int:
        """Bytes of one token's row: latent and rotary part, once, since key and value are the same."""
        return sum(part.bytes_per_token for part in self.parts(dtype, kv_format))

    def check_layout(self, layout: str, dtype: torch.dtype, kv_format: str = "auto") -> None:
        """Raise ArgumentError if its pages cannot sit in memory like that."""
        _need_layout(layout)
        if layout == "interleaved" and self.parts(dtype, kv_format)[0].format.quantized:
            raise ArgumentError(
                f"layout is 'interleaved', which keeps latent and rotary part in one tensor; kv_format {kv_format!r} "
                f"stores the latent in another dtype: choose NHD or HND"
            )

    def allocate(self, sizes: PageSizes, kv_format: str = "auto", scales: Scales | None = None) -> MlaPages:
        """Pages that are not initialized.

        "interleaved" keeps both parts of a token beside each other, as slices of one tensor [num_blocks, block_size,
        kv_lora_rank + qk_rope_head_dim]; "NHD" and "HND", which are the same where all heads share a row, keep them in
        two tensors.
        """
        num_blocks, block_size, device, layout = sizes.num_blocks, sizes.block_size, sizes.device, sizes.layout
        self.check_layout(layout, sizes.dtype, kv_format)
        latent, rotary = self.parts(sizes.dtype, kv_format)
        (scale, _) = static_scales(self, sizes.dtype, kv_format, scales)
        if layout == "interleaved":
            dims = self.kv_lora_rank, self.qk_rope_head_dim
            rows = empty_pages(num_blocks, block_size, sum(dims), dtype=sizes.dtype, device=device)
            ckv_cache, kpe_cache = rows.split(dims, dim=-1)
            return MlaPages(ckv_cache, kpe_cache, kv_format)
        return MlaPages(
            latent.pages(num_blocks, block_size, device, layout),
            rotary.pages(num_blocks, block_size, device, layout),
            kv_format,
            None if scale is None else scale.to(device),
            latent.scale_pages(num_blocks, block_size, device),
        )


Layer = GqaLayer | MlaLayer


@dataclass(frozen=True, eq=False)
class FullRows:
    """Where some rows of a layer's pages are kept in full precision too.

    pages    the blocks that are
    blocks   [num_blocks] int64: the block in `pages` of each block of the layer, or -1
    """

    pages: GqaPages | MlaPages
    blocks: Tensor

    def slots(self, slot_mapping: Tensor) -> Tensor:
        """The slots in `pages` of slots of the layer, -1 where there is none."""
        block_size = self.pages.caches[0].shape[1]
        slots = slot_mapping.long()
        block = self.blocks[(slots // block_size).clamp(min=0)]
        return torch.where((slots < 0) | (block < 0), -1, block * block_size + slots % block_size)


@dataclass(frozen=True, eq=False)
class GqaPages:
    """The pages of one GqaLayer, by the names of the ops' arguments.

    key_cache, value_cache           [num_blocks, block_size, kv_heads, head_dim | value_dim], any strides; or codes
    kv_format                        how they read
    k_scale, v_scale                 static scales, of formats that have them
    k_scale_cache, v_scale_cache     pages of scales [num_blocks, block_size, kv_heads(, groups)], likewise
    full                             blocks that are kept in full precision too
    """

    key_cache: Tensor
    value_cache: Tensor
    kv_format: str = "auto"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_scale_cache: Tensor | None = None
    v_scale_cache: Tensor | None = None
    full: FullRows | None = None

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Both, keys first."""
        return self.key_cache, self.value_cache

    @property
    def arguments(self) -> dict[str, Any]:
        """What paged_attention and reshape_and_cache want to know of a cache, by the names of their arguments."""
        return {
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "kv_format": self.kv_format,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "k_scale_cache": self.k_scale_cache,
            "v_scale_cache": self.v_scale_cache,
        }

    @property
    def key_arguments(self) -> dict[str, Any]:
        """The same for ops that ask for keys only, as accumulate_scores and token_logits."""
        return {name: value for name, value in self.arguments.items() if not name.startswith("v")}

    @property
    def gather_arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same for gather_cache, of keys and of values."""
        key, value = formats.pair(self.kv_format)
        return (
            _gather_arguments(self.key_cache, key, self.k_scale, self.k_scale_cache),
            _gather_arguments(self.value_cache, value, self.v_scale, self.v_scale_cache),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that has a row for each block: to copy a block is to copy it in each of these."""
        return _present(*self.caches, self.k_scale_cache, self.v_scale_cache)

    @property
    def static_scales(self) -> dict[str, Tensor]:
        """The static scales there are, by the names of the ops' arguments."""
        return _named(k_scale=self.k_scale, v_scale=self.v_scale)

    def coded(self, side: int, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pages, each with what rows [T, kv_heads, dim] of keys (side 0) or values (1) are in them: codes, scales."""
        name = formats.pair(self.kv_format)[side]
        cache, scale = self.caches[side], (self.k_scale, self.v_scale)[side]
        scale_cache = (self.k_scale_cache, self.v_scale_cache)[side]
        if not is_quantized(name):
            return [(cache, rows)]
        given = {"global_scale" if formats.get(name).global_scale else "scale": scale}
        codes, scales = ops.quantize_kv(rows, name, **given, role=("key", "value")[side])
        return [(cache, codes)] if scale_cache is None else [(cache, codes), (scale_cache, scales)]

    @cached_property  # asked at every write
    def key_groups(self) -> bool:
        """Whether keys share scales across tokens, and are coded in whole groups."""
        return kivi.is_kivi(formats.pair(self.kv_format)[0])

    def write(self, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [T, kv_heads, head_dim | value_dim] to their slots, as reshape_and_cache does."""
        if self.key_groups:
            kivi.write(self, slot_mapping, key, value)
        else:
            ops.reshape_and_cache(key, value, slot_mapping=slot_mapping, **self.arguments)
        if self.full is not None:
            self.full.pages.write(self.full.slots(slot_mapping), key, value)


@dataclass(frozen=True, eq=False)
class MlaPages:
    """The pages of one MlaLayer, by the names of the ops' arguments.

    ckv_cache, kpe_cache   [num_blocks, block_size, kv_lora_rank | qk_rope_head_dim], any strides; ckv_cache or codes
    kv_format              how ckv_cache reads
    k_scale                its static scale [1], of a format that has one
    k_scale_cache          pages of its scales [num_blocks, block_size, 1 or groups], likewise
    full                   blocks that are kept in full precision too
    """

    ckv_cache: Tensor
    kpe_cache: Tensor
    kv_format: str = "auto"
    k_scale: Tensor | None = None
    k_scale_cache: Tensor | None = None
    full: FullRows | None = None

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Both, the latent part first."""
        return self.ckv_cache, self.kpe_cache

    @property
    def arguments(self) -> dict[str, Any]:
        """What mla_attention and concat_and_cache_mla want to know of a cache, by the names of their arguments."""
        return {
            "ckv_cache": self.ckv_cache,
            "kpe_cache": self.kpe_cache,
            "kv_format": self.kv_format,
            "k_scale": self.k_scale,
            "k_scale_cache": self.k_scale_cache,
        }

    @property
    def gather_arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same for gather_cache, of the latent and of the rotary part."""
        return (
            _gather_arguments(self.ckv_cache, self.kv_format, self.k_scale, self.k_scale_cache),
            _gather_arguments(self.kpe_cache, "auto", None, None),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that has a row for each block: to copy a block is to copy it in each of these."""
        return _present(*self.caches, self.k_scale_cache)

    @property
    def static_scales(self) -> dict[str, Tensor]:
        """The static scale, if there is one, by the name of the ops' argument."""
        return _named(k_scale=self.k_scale)

    def write(self, slot_mapping: Tensor, ckv: Tensor, kpe: Tensor) -> None:
        """Write rows [T, kv_lora_rank | qk_rope_head_dim] to their slots, as concat_and_cache_mla does."""
        ops.concat_and_cache_mla(ckv, kpe, slot_mapping=slot_mapping, **self.arguments)
        if self.full is not None:
            self.full.pages.write(self.full.slots(slot_mapping), ckv, kpe)


Pages = GqaPages | MlaPages


def static_scales(
    layer: Layer, dtype: torch.dtype, kv_format: str, scales: Scales | None
) -> tuple[Tensor | None, Tensor | None]:
    """The static scales of a layer's two caches: those given, or ones where the format allows it."""
    parts = layer.parts(dtype, kv_format)
    given = dict(scales or {})
    found = tuple(part.static_scale(given.pop(part.scale_name, None)) for part in parts)
    if given:
        names = " and ".join(part.scale_name for part in parts if part.scale_name)
        raise ArgumentError(
            f"scales has {', '.join(map(repr, given))}; a {type(layer).__name__} takes {names}: use these names"
        )
    return found[0], found[1]


def _gather_arguments(cache: Tensor, name: str, scale: Tensor | None, scale_cache: Tensor | None) -> dict[str, Any]:
    kv_format = name if is_quantized(name) else "auto"
    return {"cache": cache, "kv_format": kv_format, "scale": scale, "scale_cache": scale_cache}


def _named(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def _need_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}: choose one")
