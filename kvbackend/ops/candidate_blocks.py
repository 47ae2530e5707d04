"""The first level of DeepSeek-V4.1's two-level selection: which blocks of index keys are worth a look."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import Float, Index, Int32, Rows, need
from ..spec import op
from . import _checks, _math, _pages, _selecting
from ._samples import IndexPool


@op(group="selecting", exact=True)
def candidate_blocks(
    q: Float[Tensor, "T Hi Di"],
    weights: Float[Tensor, "T Hi"],
    key_cache: Rows[Tensor, "nb *page"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    num_candidates: int = 2048,
    candidate_block_size: int = 8,
    compress_ratio: int = 1,
    kv_format: str = "auto",
    block_size: int = -1,
) -> Tensor:
    """Choose the blocks of neighbouring index keys that hold the highest scores, for lightning_indexer's candidates.

    A block's score is the highest of those of its visible keys. The newest visible block, which may be partial, is
    always among the chosen.

    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size
                   as in indexer_logits
    num_candidates how many blocks to choose, at least 1
    candidate_block_size   neighbouring keys of a block
    Returns block ids [T, min(num_candidates, blocks that block_table covers)] int32: block m holds the keys from
    m * candidate_block_size on. Ascending, -1 in the tail.

    Of equal scores, the lowest block is chosen; blocks whose scores are all NaN or -inf never are. While a query sees
    at most num_candidates * candidate_block_size keys, its candidates are all of them. The best k keys of the very
    scores that the candidates come from lie within them if k < num_candidates, so the layer that makes candidates may
    select from them too.
    Extra memory grows with queries x num_candidates, not with queries x context.
    Undefined on accelerators: blocks that the cache lacks (the CPU kernel takes them as no block).
    Source: DeepSeek-V4.1 (arXiv 2609.19969), with candidate_topk_blocks 2048 and candidate_block_size 8; fastllm
    docs/deepseek_v41.md.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    keys = _selecting.IndexKeys(key_cache, kv_format, block_size, compress_ratio)
    num_tokens, width = q.shape[0], _width(num_candidates, candidate_block_size, block_table, keys.block_size)
    if num_tokens == 0 or seq_lens.shape[0] == 0 or max_seqlen_q <= 0:
        return seq_lens.new_full((num_tokens, width), -1)
    rows = []
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        best = _selecting.Best(q.new_empty(len(sequence.tokens), 0, dtype=_math.compute_dtype(q)), width)
        newest = torch.div(keys.visible(sequence.positions) - 1, candidate_block_size, rounding_mode="floor")
        table = block_table[sequence.index]
        for index, scores in keys.score_tiles(q, weights, table, sequence, candidate_block_size):
            scores = scores.masked_fill(scores.isnan(), -torch.inf)
            missing = -len(index) % candidate_block_size
            scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
            block = index[::candidate_block_size] // candidate_block_size
            highest = scores.unflatten(1, (len(block), candidate_block_size)).amax(-1)
            best.add(highest.masked_fill(block == newest[:, None], torch.inf), block)
        rows.append(best.indices("position"))
    return _math.unpad(rows, cu_seqlens_q, num_tokens, -1)


def _width(num_candidates: int, candidate_block_size: int, block_table: Tensor, block_size: int) -> int:
    """Columns of the result; no more than there are blocks."""
    return torch.sym_min(num_candidates, -(-block_table.shape[1] * block_size // candidate_block_size))


@candidate_blocks.check
def _(q, key_cache, num_candidates, candidate_block_size, compress_ratio, kv_format, block_size, **_):
    _selecting.check_keys(q, key_cache, kv_format, block_size, compress_ratio)
    _selecting.check_block(candidate_block_size)
    need(num_candidates >= 1, f"num_candidates is {num_candidates}; it must be at least 1: pass how many to choose")


@candidate_blocks.values
def _(q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size, **_):
    rows = _pages.block_size_of(key_cache, kv_format, block_size)
    _checks.paged_batch(
        block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], key_cache.shape[0], rows, compress_ratio
    )


@candidate_blocks.fake
def _(q, key_cache, block_table, num_candidates, candidate_block_size, kv_format, block_size, **_):
    rows = _pages.block_size_of(key_cache, kv_format, block_size)
    return q.new_empty(q.shape[0], _width(num_candidates, candidate_block_size, block_table, rows), dtype=torch.int32)


@candidate_blocks.samples
def _(device, dtype):
    yield from _selecting.samples(device, dtype, dict(num_candidates=2))
    pool = IndexPool(device, dtype)
    wide = pool.call([2, 3], [50, 5])
    yield "all blocks", wide
    yield "blocks of 3 keys", wide | dict(num_candidates=4, candidate_block_size=3)
    yield "blocks of 1 key", wide | dict(num_candidates=4, candidate_block_size=1)
    yield "only the newest", wide | dict(num_candidates=1)
    yield "equal scores", wide | dict(q=torch.zeros_like(wide["q"]), num_candidates=3)
