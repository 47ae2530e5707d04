from ... import native
from ...ops import registry
from . import takes

op = registry["sparse_attention"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(q, sinks, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q)
    if sinks is not None:
        yield from takes.floats(sinks=sinks)


def run(
    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, softmax_scale,
    page_size, num_sinks, num_recent, softcap, sinks, k_scale, v_scale, k_scale_cache, v_scale_cache, kv_format,
    return_lse,
):  # fmt: skip
    return kernel(
        q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, softmax_scale,
        page_size, num_sinks, num_recent, softcap, sinks, k_scale, v_scale, takes.scale_bytes(k_scale_cache),
        takes.scale_bytes(v_scale_cache), kv_format, return_lse,
    )  # fmt: skip
