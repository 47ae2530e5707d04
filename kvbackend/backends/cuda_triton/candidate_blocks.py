"""Scores of a tile of keys, their maximum by block, the newest block in any case, and the best blocks so far."""

import torch

from ...ops import _math
from . import launching, scoring


def unsupported(q, kv_format, **_):
    yield from scoring.reasons(q, kv_format)


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_candidates, candidate_block_size,
    compress_ratio, kv_format, block_size,
):  # fmt: skip
    keys = scoring.Keys(
        q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, compress_ratio, kv_format, block_size
    )
    blocks = launching.cdiv(keys.columns, candidate_block_size)
    k = min(num_candidates, blocks)
    if 0 in (q.shape[0], k, seq_lens.shape[0]):
        return torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    _, position = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, q.shape[0])
    newest = ((position.clamp(min=-1) + 1) // compress_ratio - 1).div(candidate_block_size, rounding_mode="floor")
    block = torch.arange(blocks, device=q.device)

    def highest(out, first_token, first_block):
        """Of the scores in each block; keys past the table's have -inf."""
        (rows, count), columns = out.shape, out.shape[1] * candidate_block_size
        scores = torch.empty(rows, columns, dtype=torch.float32, device=q.device)
        keys.score(scores, first_token, first_block * candidate_block_size)
        scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
        torch.amax(scores.unflatten(1, (count, candidate_block_size)), 2, out=out)
        own = newest[first_token : first_token + rows, None]
        out.masked_fill_(block[first_block : first_block + count] == own, torch.inf)

    tile = max(scoring.TILE // candidate_block_size, 1)
    held = min(tile, blocks) * candidate_block_size
    return scoring.best_columns(keys, blocks, k, tile, "position", highest, held)
