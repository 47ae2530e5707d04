from ... import native
from ...ops import registry
from . import takes

op = registry["accumulate_scores"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(q, sinks, rope_cos_sin, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q)
    if sinks is not None:
        yield from takes.floats(sinks=sinks)
    yield from takes.rope_table(rope_cos_sin, q)


def run(
    q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, scores, score_cache, last_queries,
    window, softcap, sinks, k_scale, k_scale_cache, kv_format, key_positions, rope_cos_sin, rope_interleaved, key_bias,
):  # fmt: skip
    return kernel(
        q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, scores, score_cache,
        last_queries, window, softcap, sinks, k_scale, takes.scale_bytes(k_scale_cache), kv_format, key_positions,
        rope_cos_sin, rope_interleaved, key_bias,
    )  # fmt: skip
