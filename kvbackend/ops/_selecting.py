"""What the selecting ops share: index keys, their scores tile by tile, and the best of what has been seen.

All three ops that score keys (`indexer_logits`, `lightning_indexer`, `candidate_blocks`) walk the same tiles, so a
score has the same bits in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..arrays import need
from ..spec import Sample
from . import _math, _pages
from ._samples import BATCHES, IndexPool

CANDIDATE_BLOCK = 8  # entries that DeepSeek-V4.1's first level keeps or drops together
_TILE = 1024  # entries that a reference scores at a time, about


class Best:
    """The k best scores of each row, of those added so far: highest first, equal ones in the order they were added."""

    def __init__(self, like: Tensor, k: int) -> None:
        self.k = k
        self.scores = like.new_full((like.shape[0], k), -torch.inf)
        self.index = torch.full((like.shape[0], k), -1, device=like.device)

    def add(self, scores: Tensor, index: Tensor) -> None:
        """Scores [rows, n] of index [n]; NaN and -inf are passed over."""
        scores = torch.cat((self.scores, scores.masked_fill(scores.isnan(), -torch.inf)), 1)
        index = torch.cat((self.index, index.expand(scores.shape[0], -1)), 1)
        order = scores.sort(dim=1, descending=True, stable=True).indices[
            :, : self.k
        ]  # torch.topk breaks ties by chance
        self.scores, self.index = scores.gather(1, order), index.gather(1, order)

    def indices(self, order: str) -> Tensor:
        """[rows, k] int32, -1 in the tail."""
        index = self.index.masked_fill(self.scores == -torch.inf, -1)
        if order == "position":
            last = torch.iinfo(torch.int64).max
            index = index.masked_fill(index < 0, last).sort(dim=1).values
            index = index.masked_fill(index == last, -1)
        return index.int()


class IndexKeys:
    """The paged index keys of a call, with one key for each `compress_ratio` tokens."""

    def __init__(self, key_cache: Tensor, kv_format: str, block_size: int, compress_ratio: int) -> None:
        self.key_cache, self.kv_format, self.compress_ratio = key_cache, kv_format, compress_ratio
        self.block_size = _pages.block_size_of(key_cache, kv_format, block_size)

    def visible(self, positions: Tensor) -> Tensor:
        """How many keys a query at each position sees: one more than the index of the last group that it completes."""
        return torch.div(positions.clamp(min=-1) + 1, self.compress_ratio, rounding_mode="floor")

    def score_tiles(
        self, q: Tensor, weights: Tensor, block_table: Tensor, sequence: _math.Sequence, align: int = CANDIDATE_BLOCK
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(index [n], scores [queries, n]) of one sequence, -inf where a key is not there or not visible.

        A tile's first index is a multiple of `align`.
        """
        dtype, size = _math.compute_dtype(q), self.block_size
        q, weights = q[sequence.tokens].to(dtype), weights[sequence.tokens].to(dtype)
        visible = self.visible(sequence.positions)[:, None]
        length = torch.div(sequence.length, self.compress_ratio, rounding_mode="floor")
        step = -(-max(_TILE // max(size, 1), 1) // align) * align
        for block in range(0, block_table.shape[0], step):
            first = block * size
            keys, exists = _pages.gather(
                self.key_cache, self.kv_format, block_table[block : block + step], length - first, dtype, size
            )
            index = first + torch.arange(len(keys), device=q.device)
            scores = score(q, weights, keys)
            yield index, scores.masked_fill(~(exists & (index < visible)), -torch.inf)


def score(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum over heads of weights * relu(q . key): q [n, Hi, Di], weights [n, Hi], keys [S, Di] -> [n, S]."""
    total = q.new_zeros(q.shape[0], keys.shape[0])
    for head in range(q.shape[1]):  # not at once: [n, Hi, S] is large
        total = total + weights[:, head, None] * (q[:, head] @ keys.mT).relu()
    return total


def check_keys(q: Any, key_cache: Any, kv_format: str, block_size: Any, compress_ratio: Any) -> None:
    """What must hold of index keys and of what scores them."""
    _pages.check_pages("key_cache", key_cache, kv_format, "q", q, ("index_key",), block_size)
    need(
        compress_ratio >= 1,
        f"compress_ratio is {compress_ratio}; it must be at least 1: pass how many tokens share a key",
    )


def middle_end(positions: Tensor, num_recent: int, page_size: int) -> Tensor:
    """Where the last num_recent tokens of queries at `positions` begin: at a page, so that none is recent in part."""
    before = (positions + 1 - num_recent).clamp(min=0)
    return torch.div(before, page_size, rounding_mode="floor") * page_size


def check_middle(page_size: Any, num_sinks: Any, num_recent: Any) -> None:
    need(page_size >= 1, f"page_size is {page_size}; it must be at least 1: pass how many tokens are scored as one")
    need(  # so that products with it fit in 64 bits
        page_size < 2**31,
        f"page_size is {page_size}; it must be below 2**31, as lengths are: pass how many tokens are scored as one",
    )
    for name, count in (("num_sinks", num_sinks), ("num_recent", num_recent)):
        need(count >= 0, f"{name} is {count}; it must be at least 0: pass how many tokens stay in any case")


def check_block(candidate_block_size: Any) -> None:
    need(
        candidate_block_size >= 1,
        f"candidate_block_size is {candidate_block_size}; it must be at least 1: pass how many keys form a block",
    )
    need(
        candidate_block_size < 2**31,
        f"candidate_block_size is {candidate_block_size}; it must be below 2**31, as lengths are: pass how many keys "
        f"form a block",
    )


def samples(device: torch.device, dtype: torch.dtype, more: dict[str, Any]) -> Iterator[Sample]:
    """The calls that every op over index keys must take, with `more` arguments of its own."""
    for name, q_lens, seq_lens in BATCHES:
        yield name, IndexPool(device, dtype, num_blocks=12).call(q_lens, seq_lens, **more)
    for name, pool in IndexPool.variants(device, dtype):
        yield name, pool.call([3, 1], [19, 30], **more)
    pool = IndexPool(device, dtype)
    for ratio in (2, 4, 128):
        yield f"compress ratio {ratio}", pool.call([5, 2, 1], [13, 10, 130], ratio, **more)
    mixed = pool.call([1, 4], [9, 7], **more)
    extra = dict(q=torch.cat((mixed["q"], pool.randn(2, 3, 16))), weights=pool.randn(7, 3))
    yield "rows past the batch", mixed | extra
    holes = mixed["block_table"].long()
    holes[:, 0] = -1
    yield "freed first block, int64 table", mixed | dict(block_table=holes)
    yield "transposed q", mixed | dict(q=pool.randn(3, 5, 16).transpose(0, 1), weights=pool.randn(3, 5).T)
    yield (
        "one query for all",
        mixed | dict(q=mixed["q"][:1].expand(5, -1, -1), weights=mixed["weights"][:1].expand(5, -1)),
    )
    yield "float32 weights", mixed | dict(weights=mixed["weights"].float())
    keys = torch.full((pool.num_blocks, pool.block_size, 40), torch.nan, dtype=dtype, device=device)
    keys[..., 8:24] = mixed["key_cache"]
    yield "slice of a cache", mixed | dict(key_cache=keys[..., 8:24])
