"""The lightning indexer: score the index keys and select the best, without a score matrix of context length."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import Float, Index, Int32, Rows, need
from ..facts import fact
from ..spec import op
from . import _checks, _math, _pages, _selecting
from ._samples import IndexPool


@op(group="selecting", exact=True)
def lightning_indexer(
    q: Float[Tensor, "T Hi Di"],
    weights: Float[Tensor, "T Hi"],
    key_cache: Rows[Tensor, "nb *page"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    k: int,
    compress_ratio: int = 1,
    candidates: Int32[Tensor, "T num_candidates"] | None = None,
    candidate_block_size: int = 8,
    order: str = "position",
    kv_format: str = "auto",
    block_size: int = -1,
) -> Tensor:
    """Choose the k index keys of the highest scores for each query: topk_indices(indexer_logits(...)), fused.

    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size
                   as in indexer_logits
    k              how many to choose, at least 1
    candidates     [T, num_candidates] int32, from candidate_blocks: only keys j with j // candidate_block_size among a
                   row's ids are looked at; -1 is none. Not wider than the blocks that block_table covers
    candidate_block_size   keys of a candidate block
    order          "position": ascending, as sparse attention reads fastest; "score": highest first
    Returns positions [T, k] int32, of keys within the query's sequence; -1 in the tail where it sees fewer.

    Of equal scores, the lowest position is chosen; NaN and -inf never are. Extra memory grows with queries x k and
    queries x a tile of keys, not with queries x context.
    Undefined on accelerators: blocks that the cache lacks (the CPU kernel takes them as no block).
    Source: DeepSeek-V3.2-Exp, section 2.1; candidates as in DeepSeek-V4.1 (arXiv 2609.19969).
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    keys = _selecting.IndexKeys(key_cache, kv_format, block_size, compress_ratio)
    num_tokens = q.shape[0]
    if num_tokens == 0 or seq_lens.shape[0] == 0 or max_seqlen_q <= 0:
        return seq_lens.new_full((num_tokens, k), -1)
    rows = []
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        best = _selecting.Best(q.new_empty(len(sequence.tokens), 0, dtype=_math.compute_dtype(q)), k)
        for index, scores in keys.score_tiles(q, weights, block_table[sequence.index], sequence):
            if candidates is not None:
                kept = _among(index // candidate_block_size, candidates[sequence.tokens].long())
                scores = scores.masked_fill(~kept, -torch.inf)
            best.add(scores, index)
        rows.append(best.indices(order))
    return _math.unpad(rows, cu_seqlens_q, num_tokens, -1)


def _among(block: Tensor, candidates: Tensor) -> Tensor:
    """Whether each of some neighbouring blocks [n], ascending, is among a row's candidates: [rows, n]."""
    if block.shape[0] == 0:
        return torch.zeros(candidates.shape[0], 0, dtype=torch.bool, device=block.device)
    first, count = block[:1], block.shape[0]
    place = torch.where((candidates >= first) & (candidates < first + count), candidates - first, count)
    chosen = torch.zeros(candidates.shape[0], count + 1, dtype=torch.bool, device=block.device)
    chosen = chosen.scatter(1, place, True)  # a column more, for those that are elsewhere
    return chosen.gather(1, (block - first).expand(candidates.shape[0], -1))


@lightning_indexer.check
def _(
    q, key_cache, block_table, k, compress_ratio, candidates, candidate_block_size, order, kv_format, block_size, **_
):
    _selecting.check_keys(q, key_cache, kv_format, block_size, compress_ratio)
    _checks.selection(k, order)
    _selecting.check_block(candidate_block_size)
    if candidates is not None:
        rows = "key_cache.shape[1]" if kv_format == "auto" else _pages.block_size_of(key_cache, kv_format, block_size)
        covered = f"-(-block_table.shape[1] * {rows} // {candidate_block_size})"
        need(
            fact(
                f"candidates.shape[1] <= {covered}", candidates=candidates, block_table=block_table, key_cache=key_cache
            ),
            f"candidates lists more blocks of {candidate_block_size} keys than block_table covers; it holds block ids, "
            f"as candidate_blocks returns them: pass its result for this block_table",
        )


@lightning_indexer.values
def _(
    q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, candidates, candidate_block_size,
    kv_format, block_size, **_,
):  # fmt: skip
    rows = _pages.block_size_of(key_cache, kv_format, block_size)
    _checks.paged_batch(
        block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], key_cache.shape[0], rows, compress_ratio
    )
    if candidates is not None:
        covered = -(-block_table.shape[1] * rows // candidate_block_size)
        _checks.within("candidates", candidates, -1, covered, "block", "-1 is no block")


@lightning_indexer.fake
def _(q, k, **_):
    return q.new_empty(q.shape[0], k, dtype=torch.int32)


@lightning_indexer.samples
def _(device, dtype):
    yield from _selecting.samples(device, dtype, dict(k=5))
    pool = IndexPool(device, dtype)
    mixed = pool.call([1, 4], [9, 7], k=5)
    yield "by score", mixed | dict(order="score")
    yield "more than there are", mixed | dict(k=40)
    yield "k of 1", mixed | dict(k=1)
    negative = mixed | dict(weights=-mixed["weights"].abs())  # where no head is positive, scores are exactly 0
    yield "negative weights", negative
    yield "equal scores", mixed | dict(q=torch.zeros_like(mixed["q"]))
    wide = pool.call([2, 3], [50, 5], k=6)
    chosen = pool.ints([[0, 3, 6], [6, 5, 0], [-1, -1, -1], [0, 0, -1], [1, 0, 1]])
    yield "candidates", wide | dict(candidates=chosen)
    yield "candidates of 3 keys", wide | dict(candidates=chosen, candidate_block_size=3, order="score")
    yield "no candidates", wide | dict(candidates=chosen[:, :0])
