from ... import native
from ...ops import registry
from . import takes

op = registry["token_logits"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(q, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q)


def run(
    q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, pages, page_size, num_sinks, num_recent, k_scale,
    k_scale_cache, kv_format,
):  # fmt: skip
    return kernel(
        q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, pages, page_size, num_sinks, num_recent,
        k_scale, takes.scale_bytes(k_scale_cache), kv_format,
    )  # fmt: skip
