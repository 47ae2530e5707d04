"""How paged caches sit in memory, and slot arithmetic.

A cache is `[num_blocks, block_size, kv_heads, head_dim]` whatever its layout; a layout is only other strides:

    NHD           [num_blocks, block_size, kv_heads, head_dim], K and V apart
    HND           [num_blocks, kv_heads, block_size, head_dim] in memory, K and V apart
    interleaved   [num_blocks, 2, block_size, kv_heads, head_dim] in memory: K and V of a block beside each other
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ArgumentError

LAYOUTS = ("NHD", "HND", "interleaved")


def allocate_kv(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """Key and value caches [num_blocks, block_size, kv_heads, head_dim | value_dim], not initialized."""
    value_dim = head_dim if value_dim is None else value_dim
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}: choose one")
    if layout == "interleaved":
        if value_dim != head_dim:
            raise ArgumentError(
                f"layout 'interleaved' has one row size, but head_dim is {head_dim} and value_dim {value_dim}: "
                f"choose NHD or HND"
            )
        pair = torch.empty(num_blocks, 2, block_size, kv_heads, head_dim, dtype=dtype, device=device)
        return pair[:, 0], pair[:, 1]
    caches = []
    for dim in (head_dim, value_dim):
        if layout == "HND":
            caches.append(
                torch.empty(num_blocks, kv_heads, block_size, dim, dtype=dtype, device=device).transpose(1, 2)
            )
        else:
            caches.append(torch.empty(num_blocks, block_size, kv_heads, dim, dtype=dtype, device=device))
    return caches[0], caches[1]


def slot_mapping(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots of positions in sequences: block_table [B, max_blocks], positions [B, n] -> [B, n] int64.

    A negative position, or one in a block that is -1, gives slot -1.
    """
    index = positions.clamp(min=0)
    block = block_table.long().gather(1, (index // block_size).long())
    slots = block * block_size + index % block_size
    return slots.masked_fill((positions < 0) | (block < 0), -1)
