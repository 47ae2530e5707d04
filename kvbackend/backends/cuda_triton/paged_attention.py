from ...ops import _formats
from . import attending, cached, launching


def unsupported(q, value_cache, sinks, kv_format, rope_cos_sin, **_):
    yield from launching.floats(q=q, sinks=sinks)
    yield from launching.rope_at_read(rope_cos_sin)
    yield from launching.small_heads(q=q.shape[2], value_cache=_formats.values(value_cache, kv_format).width())


def run(
    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window,
    softcap, sinks, k_scale, v_scale, k_scale_cache, v_scale_cache, kv_format, key_positions, rope_cos_sin,
    rope_interleaved, key_bias, return_lse,
):  # fmt: skip
    keys, values = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    return attending.attend(
        q, cached.operand(keys), cached.operand(values), key_cache.shape[2], values.width(), block_table, seq_lens,
        cu_seqlens_q, max_seqlen_q, key_cache.shape[1], softmax_scale, causal, return_lse, window, softcap, sinks,
        key_positions, key_bias,
    )  # fmt: skip
