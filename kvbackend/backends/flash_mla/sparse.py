"""Calls of FlashMLA's sparse kernels: slots in place of positions, heads and numbers of indices that they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .vendor import CHUNK, HEADS, INDICES


def slots_of(positions: Tensor, exists: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Positions [T, n] through tables [T, max_blocks] to slots [T, n] int32; -1 where `exists` is not, or no block."""
    column = positions // max(block_size, 1)
    exists = exists & (column < block_table.shape[1])
    block = block_table.gather(1, torch.where(exists, column, 0).long())
    slot = block.long() * block_size + positions % max(block_size, 1)
    return torch.where(exists & (block >= 0), slot, -1).int()


def aligned(slots: Tensor) -> Tensor:
    """[T, 1, n] with n a multiple of what the kernels step by; what is added is no token."""
    return pad(slots, (0, -slots.shape[1] % INDICES), value=-1)[:, None]


def heads_padded(q: Tensor) -> Tensor:
    """q [T, H, D] with zeros in place of the heads that are missing to 64 or 128."""
    num_heads = next(heads for heads in HEADS if heads >= q.shape[1])
    return pad(q, (0, 0, 0, num_heads - q.shape[1])).contiguous()


def decode(
    q: Tensor, scopes: Sequence[tuple[Tensor, Tensor]], softmax_scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] over one or two pools of records, in one softmax: out [T, H, 512] and lse [T, H], natural log.

    scopes   (pages [nb, bs, 1, bytes], slots [T, n] int32) of each pool
    """
    import flash_mla

    (pages, slots), *extra = scopes
    num_heads, q, slots = q.shape[1], heads_padded(q), aligned(slots)
    more: dict[str, Any] = {}
    if sinks is not None:
        more["attn_sink"] = pad(sinks.float(), (0, q.shape[1] - num_heads))
    outs, lses = [], []
    for first in range(0, q.shape[0], CHUNK):
        part = slice(first, first + CHUNK)
        for extra_pages, extra_slots in extra:
            more |= dict(extra_k_cache=extra_pages, extra_indices_in_kvcache=aligned(extra_slots[part]))
        out, lse = flash_mla.flash_mla_with_kvcache(
            q=q[part, None],  # [t, 1, H, D]: each query a sequence, so that the scheduler may split it
            k_cache=pages,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=flash_mla.get_mla_metadata()[0],
            softmax_scale=softmax_scale,
            is_fp8_kvcache=True,
            indices=slots[part],
            **more,
        )
        outs.append(out[:, 0, :num_heads])
        lses.append(lse[:, :num_heads, 0])
    return torch.cat(outs), torch.cat(lses)


def cleaned(out: Tensor, lse: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    """As the ops return them: FlashMLA's lse of a query that sees nothing is +inf."""
    nothing = lse == torch.inf
    out = out.masked_fill(nothing[..., None], 0)
    return out, lse.masked_fill(nothing, -torch.inf) if return_lse else lse.new_empty(0)
