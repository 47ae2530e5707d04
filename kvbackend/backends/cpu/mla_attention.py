from ... import native
from ...ops import registry
from . import takes

op = registry["mla_attention"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(q_nope, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q_nope=q_nope)


def run(
    q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
    kv_format, k_scale, k_scale_cache, return_lse,
):  # fmt: skip
    if kv_format == "auto" and k_scale is k_scale_cache is None and not return_lse:
        return kernel(  # what the schema has itself costs no time
            q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal
        )  # fmt: skip
    return kernel(
        q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
        kv_format, k_scale, takes.scale_bytes(k_scale_cache), return_lse,
    )  # fmt: skip
