from . import scoring


def unsupported(q, kv_format, **_):
    yield from scoring.reasons(q, kv_format)


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size
):  # fmt: skip
    return scoring.scores(
        q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, compress_ratio, kv_format, block_size, 0,
        q.shape[0],
    )  # fmt: skip
