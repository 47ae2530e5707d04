"""How paged caches sit in memory, and slot arithmetic.

A cache is `[num_blocks, block_size, kv_heads, head_dim]` whatever its layout; a layout is only other strides:

    NHD           [num_blocks, block_size, kv_heads, head_dim], K and V apart
    HND           [num_blocks, kv_heads, block_size, head_dim] in memory, K and V apart
    interleaved   [num_blocks, 2, block_size, kv_heads, head_dim] in memory: K and V of a block beside each other

Ascend's fractal pages have another shape, which no op here reads; `transcode` makes them and takes them apart:

    NZ            [num_blocks, kv_heads, head_dim / f, block_size, f], K and V apart, f numbers in 32 bytes. With dims 1
                  and 2 as one, what npu_scatter_pa_kv_cache writes in cache_mode "PA_NZ"
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError

LAYOUTS = ("NHD", "HND", "interleaved")
FRACTAL, FRACTAL_BYTES = "NZ", 32
HUGE_PAGE = 2 << 20  # bytes, of x86-64 and of arm64 with pages of 4 KiB


def empty_pages(*shape: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Pages of a cache [*shape], not initialized; on a CPU, Linux is asked to back them with huge pages.

    Attention reads pages in any order, where small pages of memory cost a walk through the page table for each. Where
    the kernel never gives huge pages, or the tensor is smaller than one, it is like any other.
    """
    pages = torch.empty(*shape, dtype=dtype, device=device)
    # a fake tensor has no memory, and those who trace call this too
    if type(pages) is Tensor and pages.device.type == "cpu" and pages.nbytes >= HUGE_PAGE and sys.platform == "linux":
        start = -(-pages.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (pages.data_ptr() + pages.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        # advice: whether it is taken changes no result
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return pages


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
        pair = empty_pages(num_blocks, 2, block_size, kv_heads, head_dim, dtype=dtype, device=device)
        return pair[:, 0], pair[:, 1]
    caches = []
    for dim in (head_dim, value_dim):
        if layout == "HND":
            caches.append(
                empty_pages(num_blocks, kv_heads, block_size, dim, dtype=dtype, device=device).transpose(1, 2)
            )
        else:
            caches.append(empty_pages(num_blocks, block_size, kv_heads, dim, dtype=dtype, device=device))
    return caches[0], caches[1]


def transcode(
    cache: Tensor | tuple[Tensor, Tensor], from_layout: str, to_layout: str, block_size: int
) -> Tensor | tuple[Tensor, Tensor]:
    """A cache in another layout: the same numbers, to the bit.

    cache        pages [nb, page_bytes] uint8 of a record, see `kvbackend.formats`; or the key and value caches
                 [nb, bs, Hk, D | Dv] of a split layout (their codes, or the scales that belong to them), in NZ
                 [nb, Hk, D | Dv / f, bs, f]
    from_layout, to_layout   two records that hold the same numbers, or two of NHD, HND, interleaved and NZ
    block_size   tokens of a block, which stay together
    Returns what `cache` is, in to_layout, newly allocated; padding of records is zero.
    Raises ArgumentError where something could be lost, or where `cache` is not as from_layout says.
    """
    from . import ops  # ops' samples allocate caches here

    split = [layout in (*LAYOUTS, FRACTAL) for layout in (from_layout, to_layout)]
    if isinstance(cache, Tensor) and not any(split):
        pages: Tensor = ops.transcode(cache, from_layout, to_layout, block_size)
        return pages
    if isinstance(cache, Tensor) or not all(split):
        held = "one tensor" if isinstance(cache, Tensor) else "a pair of tensors"
        raise ArgumentError(
            f"cache is {held}, from_layout {from_layout!r} and to_layout {to_layout!r}; one tensor holds pages of a "
            f"record, a pair holds keys and values in {', '.join((*LAYOUTS, FRACTAL))}: pass layouts of one kind and "
            f"what they hold"
        )
    if from_layout == FRACTAL:
        cache, from_layout = (_from_fractals(cache[0], block_size), _from_fractals(cache[1], block_size)), "NHD"
    key, value = cache
    _need_layout(key, value, from_layout, block_size)
    if to_layout == FRACTAL:
        return _to_fractals(key), _to_fractals(value)
    num_blocks, _, kv_heads, head_dim = key.shape
    sizes = num_blocks, block_size, kv_heads, head_dim, value.shape[3]
    targets = allocate_kv(*sizes, dtype=key.dtype, device=key.device, layout=to_layout)
    every_block = torch.arange(key.shape[0])[:, None].expand(-1, 2)
    for source, target in zip(cache, targets, strict=True):
        ops.swap_blocks(source, target, every_block)
    return targets


def _to_fractals(cache: Tensor) -> Tensor:
    """[nb, bs, Hk, D] in NZ, newly allocated."""
    numbers = FRACTAL_BYTES // cache.element_size()
    if cache.shape[3] % numbers:
        raise ArgumentError(
            f"cache has rows of {cache.shape[3]} numbers; layout {FRACTAL!r} takes multiples of {numbers} in "
            f"{cache.dtype}: keep it in {', '.join(LAYOUTS)}"
        )
    return cache.unflatten(3, (-1, numbers)).permute(0, 2, 3, 1, 4).clone(memory_format=torch.contiguous_format)


def _from_fractals(cache: Tensor, block_size: int) -> Tensor:
    """NZ as [nb, bs, Hk, D], newly allocated."""
    wanted = block_size, FRACTAL_BYTES // cache.element_size()
    if cache.dim() != 5 or cache.shape[3:] != wanted or not cache.is_contiguous():
        raise ArgumentError(
            f"cache has pages of shape {list(cache.shape)} and strides {list(cache.stride())}; in layout {FRACTAL!r} "
            f"they are dense, [num_blocks, kv_heads, fractals, {wanted[0]}, {wanted[1]}] in {cache.dtype}: pass what "
            f"was written so"
        )
    return cache.permute(0, 3, 1, 2, 4).flatten(3).clone(memory_format=torch.contiguous_format)


def _need_layout(key: Tensor, value: Tensor, layout: str, block_size: int) -> None:
    """Key and value caches lie in memory as the layout says."""
    if key.dim() != 4 or key.shape[:3] != value.shape[:3] or key.dtype != value.dtype or key.shape[1] != block_size:
        raise ArgumentError(
            f"cache has keys of shape {list(key.shape)} in {key.dtype} and values of {list(value.shape)} in "
            f"{value.dtype}; both must be [num_blocks, {block_size}, kv_heads, dim] in one dtype: pass caches of one "
            f"layer and their block_size"
        )
    num_blocks, _, kv_heads, head_dim = key.shape
    sizes = num_blocks, block_size, kv_heads, head_dim, value.shape[3]
    wanted = allocate_kv(*sizes, dtype=key.dtype, device="meta", layout=layout)
    for name, have, want in zip(("keys", "values"), (key, value), wanted, strict=True):
        for size, stride, wanted_stride in zip(have.shape, have.stride(), want.stride(), strict=True):
            if size > 1 and stride != wanted_stride:
                raise ArgumentError(
                    f"cache has {name} with strides {list(have.stride())}; in layout {layout!r} they are "
                    f"{list(want.stride())}: name the layout that it has"
                )


def slot_mapping(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots of positions in sequences: block_table [B, max_blocks], positions [B, n] -> [B, n] int64.

    A negative position, or one in a block that is -1, gives slot -1.
    """
    index = positions.clamp(min=0)
    block = block_table.long().gather(1, (index // block_size).long())
    slots = block * block_size + index % block_size
    return slots.masked_fill((positions < 0) | (block < 0), -1)
