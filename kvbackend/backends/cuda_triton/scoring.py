"""Scores of index keys, a bounded number at a time: what the selecting ops share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import _pages
from . import launching, records

MAX_SCORES = 1 << 26  # scores that are held at a time: 256 MiB
BLOCK_N = 64
HEADS = 64


def reasons(q: Tensor, kv_format: str) -> Iterator[str]:
    """Why keys cannot be scored."""
    yield from launching.floats(q=q)
    yield from records.unsupported(kv_format)
    if q.shape[2] > 256:
        yield f"q has {q.shape[2]} dims; the Triton kernel takes up to 256: use the reference"


def width_of(key_cache: Tensor, block_table: Tensor, kv_format: str, block_size: int) -> int:
    """Keys that the table has room for."""
    return int(block_table.shape[1] * _pages.block_size_of(key_cache, kv_format, block_size))


def scores(
    q: Tensor, weights: Tensor, key_cache: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    compress_ratio: int, kv_format: str, block_size: int, first: int, count: int,
) -> Tensor:  # fmt: skip
    """[count, width] float32 of the tokens from `first` on, as indexer_logits returns them."""
    from ...triton.indexer_logits import indexer_logits

    width = width_of(key_cache, block_table, kv_format, block_size)
    out = torch.empty(count, width, dtype=torch.float32, device=q.device)
    if 0 in (key_cache.shape[0], seq_lens.shape[0]) or out.numel() == 0:
        return out.fill_(-torch.inf)
    keys, _ = records.operand(key_cache, kv_format, block_size)
    num_heads, dim = q.shape[1:]
    narrow = q.dtype is torch.float32
    launching.launch(
        indexer_logits, (count, launching.cdiv(width, BLOCK_N)), q, *q.stride(), weights, *weights.stride(),
        *keys.rows, *keys.scales, keys.number, block_table, *block_table.stride(), seq_lens.contiguous(),
        cu_seqlens_q.contiguous(), out, first, seq_lens.shape[0], num_heads, dim, width,
        _pages.block_size_of(key_cache, kv_format, block_size), compress_ratio, **keys.constants,
        DOT=launching.dot_type(q.dtype), HEADS=min(max(launching.power_of_two(num_heads), 16), 16 if narrow else HEADS),
        BLOCK_N=BLOCK_N, BLOCK_D=max(launching.power_of_two(dim), 16), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def chunks(num_tokens: int, width: int) -> Iterator[tuple[int, int]]:
    """(first, count) of tokens whose scores are held together."""
    step = max(MAX_SCORES // max(width, 1), 1)
    for first in range(0, num_tokens, step):
        yield first, min(step, num_tokens - first)


def block_of(count: int, most: int) -> int:
    """Elements of a tile; triton-ascend compiles none of one element."""
    return min(max(launching.power_of_two(count), 16), most)


def best(scores: Tensor, k: int, lengths: Tensor | None, order: str) -> Tensor:
    """Positions [T, k] int32 of the k highest scores, as topk_indices returns them."""
    from ...triton.topk_indices import order_by_score, topk_by_position

    num_rows, columns = scores.shape
    chosen = torch.full((num_rows, k), -1, dtype=torch.int32, device=scores.device)
    launching.launch(
        topk_by_position, (num_rows,), scores, *scores.stride(), scores if lengths is None else lengths,
        0 if lengths is None else lengths.stride(0), chosen, columns, k, HAS_LENGTHS=lengths is not None,
        BLOCK=block_of(columns, 1024), num_warps=4,
    )  # fmt: skip
    if order == "position":
        return chosen
    out = torch.full_like(chosen, -1)
    tile = block_of(k, 64)
    launching.launch(
        order_by_score, (num_rows, launching.cdiv(k, tile)), scores, *scores.stride(), chosen, out, k, BLOCK=tile,
        OTHERS=block_of(k, 128), num_warps=4,
    )  # fmt: skip
    return out
