"""Scores of keys, their maximum by block, the newest block in any case, and the best blocks."""

import torch

from ...ops import _math
from . import scoring


def unsupported(q, kv_format, **_):
    yield from scoring.reasons(q, kv_format)


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_candidates, candidate_block_size,
    compress_ratio, kv_format, block_size,
):  # fmt: skip
    num_tokens = q.shape[0]
    keys = scoring.Keys(
        q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, compress_ratio, kv_format, block_size
    )
    width = keys.columns
    blocks = -(-width // candidate_block_size)
    out = torch.full((num_tokens, min(num_candidates, blocks)), -1, dtype=torch.int32, device=q.device)
    if 0 in (*out.shape, seq_lens.shape[0]):
        return out
    _, position = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    newest = ((position.clamp(min=-1) + 1) // compress_ratio - 1).div(candidate_block_size, rounding_mode="floor")
    block = torch.arange(blocks, device=q.device)
    for first, count in scoring.chunks(num_tokens, width):
        part = slice(first, first + count)
        scores = keys.score(torch.empty(count, width, dtype=torch.float32, device=q.device), first)
        scores = scores.masked_fill(scores.isnan(), -torch.inf)
        scores = torch.nn.functional.pad(scores, (0, blocks * candidate_block_size - width), value=-torch.inf)
        highest = scores.unflatten(1, (blocks, candidate_block_size)).amax(-1)
        highest = highest.masked_fill(block == newest[part, None], torch.inf)
        out[part] = scoring.best(highest, out.shape[1], None, "position")
    return out
