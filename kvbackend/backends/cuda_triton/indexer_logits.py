import torch

from . import scoring


def unsupported(q, kv_format, **_):
    yield from scoring.reasons(q, kv_format)


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size
):  # fmt: skip
    keys = scoring.Keys(
        q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, compress_ratio, kv_format, block_size
    )
    return keys.score(torch.empty(q.shape[0], keys.columns, dtype=torch.float32, device=q.device))
