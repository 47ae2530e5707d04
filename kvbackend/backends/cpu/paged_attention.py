from ... import native
from ...ops import registry
from . import takes

op = registry["paged_attention"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(q, sinks, rope_cos_sin, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q)
    if sinks is not None:
        yield from takes.floats(sinks=sinks)
    yield from takes.rope_table(rope_cos_sin, q)


def run(
    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window,
    softcap, sinks, k_scale, v_scale, k_scale_cache, v_scale_cache, kv_format, key_positions, rope_cos_sin,
    rope_interleaved, key_bias, return_lse,
):  # fmt: skip
    plain = kv_format == "auto" and sinks is k_scale is v_scale is k_scale_cache is v_scale_cache is None
    if plain and key_positions is rope_cos_sin is key_bias is None and not (rope_interleaved or return_lse):
        # what the schema has itself costs no time
        return kernel(
            q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window,
            softcap,
        )  # fmt: skip
    return kernel(
        q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window,
        softcap, sinks, k_scale, v_scale, takes.scale_bytes(k_scale_cache), takes.scale_bytes(v_scale_cache), kv_format,
        key_positions, rope_cos_sin, rope_interleaved, key_bias, return_lse,
    )  # fmt: skip
