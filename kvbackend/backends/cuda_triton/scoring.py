"""Scores of index keys, a bounded number at a time: what the selecting ops share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import _pages
from . import launching, records

MAX_SCORES = 1 << 26  # scores that are held at a time: 256 MiB
TILE = 8192  # scores of a query that are made before the best are kept
BLOCK_N = 64
HEADS = 64


def reasons(q: Tensor, kv_format: str) -> Iterator[str]:
    """Why keys cannot be scored."""
    yield from launching.floats(q=q)
    yield from records.unsupported(kv_format)
    yield from launching.small_heads(q=q.shape[2])


@dataclass(frozen=True)
class Keys:
    """The queries and index keys of a call, and the candidate blocks that each query looks at, if these are given."""

    q: Tensor
    weights: Tensor
    key_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    compress_ratio: int
    kv_format: str
    block_size: int
    candidates: Tensor | None = None
    candidate_size: int = 1

    @property
    def columns(self) -> int:
        """Keys that a query may look at."""
        if self.candidates is not None:
            return self.candidates.shape[1] * self.candidate_size
        return self.block_table.shape[1] * _pages.block_size_of(self.key_cache, self.kv_format, self.block_size)

    def score(self, out: Tensor, first_token: int = 0, first_column: int = 0) -> Tensor:
        """Write indexer_logits of some tokens and columns to out [tokens, columns] float32, dense columns."""
        from ...triton.indexer_logits import indexer_logits

        count, columns = out.shape
        if 0 in (self.key_cache.shape[0], self.seq_lens.shape[0]) or out.numel() == 0:
            return out.fill_(-torch.inf)
        keys, _ = records.operand(self.key_cache, self.kv_format, self.block_size)
        num_heads, dim = self.q.shape[1:]
        table = self.block_table
        most_heads = 16 if self.q.dtype is torch.float32 else HEADS
        launching.launch(
            indexer_logits, (count, launching.cdiv(columns, BLOCK_N)), self.q, *self.q.stride(), self.weights,
            *self.weights.stride(), *keys.rows, *keys.scales, keys.number, table, *table.stride(), table.shape[1],
            self.seq_lens.contiguous(), self.cu_seqlens_q.contiguous(), *self.candidate_args(), out, out.stride(0),
            first_token, first_column, columns, self.seq_lens.shape[0], num_heads, dim,
            _pages.block_size_of(self.key_cache, self.kv_format, self.block_size), self.compress_ratio,
            **keys.constants, CANDIDATES=self.candidates is not None, DOT=launching.dot_type(self.q.dtype),
            HEADS=block_of(num_heads, most_heads), BLOCK_N=BLOCK_N, BLOCK_D=launching.dot_block(dim), num_warps=4,
            num_stages=1,
        )  # fmt: skip
        return out

    def candidate_args(self, first_token: int = 0) -> tuple[Any, ...]:
        """The candidates of the tokens from first_token on, their strides, and the keys of a block."""
        if self.candidates is None:
            return self.seq_lens, 0, 0, 1
        return self.candidates[first_token:], *self.candidates.stride(), self.candidate_size


def best_keys(keys: Keys, k: int, order: str) -> Tensor:
    """Positions [T, k] int32 of the k highest scores of each query, TILE columns at a time."""
    return best_columns(keys, keys.columns, k, TILE, order, keys.score)


def best_columns(
    keys: Keys, columns: int, k: int, tile: int, order: str, fill: Callable[[Tensor, int, int], Any], beside: int = 0
) -> Tensor:
    """Positions [T, k] int32 of the k highest of the columns of each query, which are made `tile` at a time.

    fill     writes a tile [rows, n], of the tokens and the columns from two numbers on
    beside   scores that it holds for each row while it does
    """
    from ...triton.lightning_indexer import keep_best

    num_tokens, tile = keys.q.shape[0], min(tile, columns)
    out = torch.full((num_tokens, k), -1, dtype=torch.int32, device=keys.q.device)
    if tile == 0:
        return out
    step = max(MAX_SCORES // (2 * (k + tile) + beside), 1)
    for first in range(0, num_tokens, step):
        count = min(step, num_tokens - first)
        # what was kept stands before the new scores; the next of the two buffers gets what is kept of both
        buffers = torch.empty(2, count, k + tile, dtype=torch.float32, device=out.device)
        positions = torch.empty(2, count, k, dtype=torch.int32, device=out.device)
        now = 0
        for column in range(0, columns, tile):
            width = min(tile, columns - column)
            fill(buffers[now, :, k : k + width], first, column)
            launching.launch(
                keep_best, (count,), buffers[now], k + tile, positions[now], *keys.candidate_args(first),
                buffers[1 - now], k + tile, positions[1 - now], column, 0 if column else k, k + width, k,
                CANDIDATES=keys.candidates is not None, BLOCK=block_of(k + width, 1024), num_warps=8,
            )  # fmt: skip
            now = 1 - now
        kept = positions[now]
        if order == "score":
            places = torch.arange(k, dtype=torch.int32, device=out.device).where(kept >= 0, -1)
            places = by_score(buffers[now, :, :k], places)
            kept = torch.where(places >= 0, kept.gather(1, places.clamp(min=0).long()), -1)
        out[first : first + count] = kept
    return out


def block_of(count: int, most: int) -> int:
    """Elements of a tile; triton-ascend compiles none of one element."""
    return min(max(launching.power_of_two(count), 16), most)


def best(scores: Tensor, k: int, lengths: Tensor | None, order: str) -> Tensor:
    """Positions [T, k] int32 of the k highest scores, as topk_indices returns them."""
    from ...triton.topk_indices import topk_by_position

    num_rows, columns = scores.shape
    chosen = torch.full((num_rows, k), -1, dtype=torch.int32, device=scores.device)
    launching.launch(
        topk_by_position, (num_rows,), scores, *scores.stride(), scores if lengths is None else lengths,
        0 if lengths is None else lengths.stride(0), chosen, columns, k, HAS_LENGTHS=lengths is not None,
        BLOCK=block_of(columns, 1024), num_warps=4,
    )  # fmt: skip
    return chosen if order == "position" else by_score(scores, chosen)


def by_score(scores: Tensor, chosen: Tensor) -> Tensor:
    """Chosen columns [T, k], ascending, by score: highest first, equal ones in the order they have."""
    from ...triton.topk_indices import order_by_score

    num_rows, k = chosen.shape
    out = torch.full_like(chosen, -1)
    tile = block_of(k, 64)
    launching.launch(
        order_by_score, (num_rows, launching.cdiv(k, tile)), scores, *scores.stride(), chosen, out, k, BLOCK=tile,
        OTHERS=block_of(k, 128), num_warps=4,
    )  # fmt: skip
    return out
