"""A tile of scores for each query, and the best of it and of those kept before: memory grows with queries x (tile + k).

Candidates are scored alone, in ascending order and each once.
"""

import torch

from . import scoring


def unsupported(q, kv_format, **_):
    yield from scoring.reasons(q, kv_format)


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, k, compress_ratio, candidates,
    candidate_block_size, order, kv_format, block_size,
):  # fmt: skip
    if candidates is not None:
        candidates = candidates.sort(1).values
        again = torch.nn.functional.pad(candidates[:, 1:] == candidates[:, :-1], (1, 0), value=False)
        candidates = candidates.masked_fill(again, -1)
    keys = scoring.Keys(
        q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, compress_ratio, kv_format, block_size, candidates,
        candidate_block_size,
    )  # fmt: skip
    return scoring.best_keys(keys, k, order)
