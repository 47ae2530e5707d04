"""Caches full of NaN, rows that tell tokens apart, and what a cache in some format gives back of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbackend import codecs, formats
from kvbackend.cache import GqaLayer, PagedCache

# The ops that no backend has a kernel for where caches hold codes.
CODES = (
    *("reshape_and_cache", "concat_and_cache_mla", "gather_cache", "paged_attention", "mla_attention"),
    *("quantize_kv", "dequantize_kv"),
)


def nan_cache(
    layers: tuple[Any, ...],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    layout: str = "NHD",
    **options: Any,
) -> PagedCache:
    cache = PagedCache(layers, num_blocks, block_size, dtype, layout=layout, **options)
    full = [pages.full.pages for pages in cache.layers if pages.full is not None]
    for pages in [*all_pages(cache), *(tensor for layer in full for tensor in layer.tensors)]:
        pages.view(torch.uint8).fill_(255)  # NaN in every float dtype
    return cache


def all_pages(cache: PagedCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in layer.tensors]


def snapshot(cache: PagedCache) -> list[Tensor]:
    """All pages as bytes, so that NaN equals itself."""
    return [pages.contiguous().view(torch.uint8).clone() for pages in all_pages(cache)]


def rows_of(numbers: list[int], part: int, shape: torch.Size) -> Tensor:
    """[len(numbers), *shape] in -3 .. 3: rows that tell token, layer part and place apart, exactly in float32."""
    inside = torch.arange(shape.numel()).reshape(shape) * 1299709
    start = torch.tensor([number * 7919 + part * 104729 for number in numbers], dtype=torch.int64)
    hashed = (start.reshape(-1, *[1] * len(shape)) + inside) % 2003
    return (hashed - 1001).float() * (3 / 1024)


def row_shapes(spec: Any) -> tuple[torch.Size, torch.Size]:
    if isinstance(spec, GqaLayer):
        return torch.Size([spec.kv_heads, spec.head_dim]), torch.Size([spec.kv_heads, spec.value_width])
    return torch.Size([spec.kv_lora_rank]), torch.Size([spec.qk_rope_head_dim])


def layer_rows(cache: PagedCache, layer: int, numbers: list[int]) -> list[Tensor]:
    return [rows_of(numbers, 2 * layer + j, shape) for j, shape in enumerate(row_shapes(cache.specs[layer]))]


def write(cache: PagedCache, slots: Tensor, numbers: list[int]) -> None:
    for i, pages in enumerate(cache.layers):
        pages.write(slots, *layer_rows(cache, i, numbers))


def stored(cache: PagedCache, layer: int, numbers: list[int], kept: Tensor | None = None) -> list[Tensor]:
    """What a layer gives back of these tokens: the codec's round trip, and rows as they were where `kept` says so."""
    names, found = [*formats.pair(cache.kv_formats[layer])], []
    if not isinstance(cache.specs[layer], GqaLayer):
        names[1] = "auto"
    pages = cache.layers[layer]
    static = pages.k_scale, getattr(pages, "v_scale", None)
    for name, scale, rows in zip(names, static, layer_rows(cache, layer, numbers), strict=True):
        back = round_trip(rows, name, scale)
        found.append(back if kept is None else torch.where(kept.reshape(-1, *[1] * (rows.dim() - 1)), rows, back))
    return found


def round_trip(rows: Tensor, name: str, scale: Tensor | None) -> Tensor:
    """Rows [T, heads, dim] or [T, dim], quantized and back in their dtype."""
    if name == "auto" or not formats.get(name).quantized:
        return rows
    fmt, by_head = formats.get(name), rows if rows.dim() == 3 else rows[:, None]
    global_scale, scale = (scale, None) if fmt.global_scale else (None, scale)
    coded = codecs.encode(by_head, fmt, global_scale=global_scale, scale=scale)
    return codecs.decode(*coded, fmt, global_scale=global_scale, dtype=rows.dtype).reshape(rows.shape)


def tables(cache: PagedCache, seqs: list[int]) -> list[list[int]]:
    found = cache.batch(seqs, [0] * len(seqs))["block_table"].tolist()
    return [[block for block in table if block >= 0] for table in found]
