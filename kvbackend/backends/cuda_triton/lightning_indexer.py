"""indexer_logits and topk_indices, for as many queries at a time as bounded memory has room for."""

import torch

from . import scoring


def unsupported(q, kv_format, **_):
    yield from scoring.reasons(q, kv_format)


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, k, compress_ratio, candidates,
    candidate_block_size, order, kv_format, block_size,
):  # fmt: skip
    width = scoring.width_of(key_cache, block_table, kv_format, block_size)
    out = torch.empty(q.shape[0], k, dtype=torch.int32, device=q.device)
    for first, count in scoring.chunks(q.shape[0], width):
        scores = scoring.scores(
            q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, compress_ratio, kv_format, block_size, first,
            count,
        )  # fmt: skip
        if candidates is not None:
            scores.masked_fill_(~among(candidates[first : first + count], candidate_block_size, width), -torch.inf)
        out[first : first + count] = scoring.best(scores, k, None, order)
    return out


def among(candidates, candidate_block_size, width):
    """Whether each of `width` keys is in a candidate block of its row: [rows, width]."""
    blocks = -(-width // candidate_block_size)
    kept = torch.zeros(candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device)
    inside = (candidates >= 0) & (candidates < blocks)
    kept.scatter_(1, torch.where(inside, candidates, blocks).long(), True)  # the last column is for none
    return kept[:, :blocks].repeat_interleave(candidate_block_size, 1, output_size=blocks * candidate_block_size)[
        :, :width
    ]
