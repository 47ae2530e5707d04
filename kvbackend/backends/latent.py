"""MLA's latent and rotary caches as the one tensor that libraries for NVIDIA GPUs read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..facts import fact


def separate(name: str, ckv_cache: Any, kpe_cache: Any) -> Iterator[str]:
    """Why the two caches are not the halves of one dense tensor [nb, bs, kv_lora_rank + qk_rope_head_dim]."""
    width = ckv_cache.shape[2] + kpe_cache.shape[2]
    together = kpe_cache.shares_storage(ckv_cache) and fact(
        "kpe_cache.storage_offset() - ckv_cache.storage_offset() == ckv_cache.shape[-1]",
        kpe_cache=kpe_cache,
        ckv_cache=ckv_cache,
    )
    dense = all(
        cache.stride(2) == 1 and cache.stride(1) == width and cache.stride(0) == cache.shape[1] * width
        for cache in (ckv_cache, kpe_cache)
    )
    if not (together and dense):
        yield (
            f"ckv_cache and kpe_cache are not the halves of one dense tensor; {name} reads rows of {width} numbers: "
            f"allocate [blocks, rows of a block, {width}] and pass its two slices"
        )


def joined(ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
    """The tensor [nb, bs, kv_lora_rank + qk_rope_head_dim] that the two are the halves of."""
    num_blocks, block_size, rank = ckv_cache.shape
    return ckv_cache.as_strided((num_blocks, block_size, rank + kpe_cache.shape[2]), ckv_cache.stride())


def query(q_nope: Tensor, q_pe: Tensor) -> Tensor:
    """Queries [T, H, kv_lora_rank + qk_rope_head_dim]."""
    return torch.cat((q_nope, q_pe), -1)
