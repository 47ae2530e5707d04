"""What one layer keeps of a token, and its pages: keys and values of kv heads, or MLA's latent and rotary row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import formats, ops
from ..errors import ArgumentError
from ..layouts import LAYOUTS, allocate_kv


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
        _need_positive(self, kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.value_width)

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values."""
        stored = formats.of_dtype(str(dtype))
        return int(sum(stored.bytes_per_token(self.kv_heads, dim) for dim in (self.head_dim, self.value_width)))

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, layout: str
    ) -> GqaPages:
        """Pages that are not initialized; the layouts are those of `kvbackend.layouts`."""
        sizes = num_blocks, block_size, self.kv_heads, self.head_dim, self.value_width
        return GqaPages(*allocate_kv(*sizes, dtype=dtype, device=device, layout=layout))


@dataclass(frozen=True)
class MlaLayer:
    """A layer of multi-head latent attention: one row for all heads, which is key and value.

    kv_lora_rank       width of the latent part
    qk_rope_head_dim   width of the rotary part
    """

    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        _need_positive(self, kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's row: latent and rotary part, once, since key and value are the same."""
        return int(formats.of_dtype(str(dtype)).bytes_per_token(1, self.kv_lora_rank + self.qk_rope_head_dim))

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, layout: str
    ) -> MlaPages:
        """Pages that are not initialized.

        "interleaved" keeps both parts of a token beside each other, as slices of one tensor [num_blocks, block_size,
        kv_lora_rank + qk_rope_head_dim]; "NHD" and "HND", which are the same where all heads share a row, keep them in
        two tensors.
        """
        if layout not in LAYOUTS:
            raise ArgumentError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}: choose one")
        dims = self.kv_lora_rank, self.qk_rope_head_dim
        if layout == "interleaved":
            rows = torch.empty(num_blocks, block_size, sum(dims), dtype=dtype, device=device)
            return MlaPages(*rows.split(dims, dim=-1))
        return MlaPages(*(torch.empty(num_blocks, block_size, dim, dtype=dtype, device=device) for dim in dims))


Layer = GqaLayer | MlaLayer


@dataclass(frozen=True, eq=False)
class GqaPages:
    """The pages of one GqaLayer: [num_blocks, block_size, kv_heads, head_dim | value_dim], any strides."""

    key_cache: Tensor
    value_cache: Tensor

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Both, keys first."""
        return self.key_cache, self.value_cache

    def write(self, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [T, kv_heads, head_dim | value_dim] to their slots, as reshape_and_cache does."""
        ops.reshape_and_cache(key, value, self.key_cache, self.value_cache, slot_mapping)


@dataclass(frozen=True, eq=False)
class MlaPages:
    """The pages of one MlaLayer: [num_blocks, block_size, kv_lora_rank | qk_rope_head_dim], any strides."""

    ckv_cache: Tensor
    kpe_cache: Tensor

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Both, the latent part first."""
        return self.ckv_cache, self.kpe_cache

    def write(self, slot_mapping: Tensor, ckv: Tensor, kpe: Tensor) -> None:
        """Write rows [T, kv_lora_rank | qk_rope_head_dim] to their slots, as concat_and_cache_mla does."""
        ops.concat_and_cache_mla(ckv, kpe, self.ckv_cache, self.kpe_cache, slot_mapping)


Pages = GqaPages | MlaPages


def _need_positive(layer: Layer, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(
                f"{name} of {type(layer).__name__} is {size}; it must be 1 or more: pass the sizes of the model"
            )
