"""triton/attention.py, where the latent is the first part of the one key of all heads, and the value."""

from ...ops import _formats
from . import attending, cached, launching


def unsupported(q_nope, q_pe, **_):
    yield from launching.floats(q_nope=q_nope)
    if q_nope.shape[2] > 512 or q_pe.shape[2] > 64:
        yield (
            f"q_nope and q_pe have {q_nope.shape[2]} and {q_pe.shape[2]} dims; the Triton kernel takes up to 512 and "
            f"64: use the CPU or the reference"
        )


def run(
    q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
    kv_format, k_scale, k_scale_cache, return_lse,
):  # fmt: skip
    latents, _ = _formats.latent(kv_format, ckv_cache, kpe_cache, k_scale, k_scale_cache)
    keys = cached.operand(latents)
    return attending.attend(
        q_nope, keys, keys, 1, q_nope.shape[2], block_table, seq_lens, cu_seqlens_q, max_seqlen_q, ckv_cache.shape[1],
        softmax_scale, causal, return_lse, q_pe=q_pe, k_pe=kpe_cache,
    )  # fmt: skip
