"""torch_npu.npu_fused_infer_attention_score_v2 in its MLA mode: the latent pages are key and value of one kv head."""

from ...facts import fact
from ...ops import registry
from . import fused_infer, host_lengths, takes
from .vendor_ops import FUSED_INFER_ATTENTION as VENDOR

op = registry["mla_attention"]


def unsupported(q_nope, q_pe, ckv_cache, kpe_cache, seq_lens, kv_format, return_lse, **_):
    yield from VENDOR.missing()
    yield from takes.plain_formats(VENDOR, kv_format)
    yield from VENDOR.refuse("dtype", q_nope.dtype, "q_nope is", "convert it, and allocate the caches alike")
    yield from takes.dense(ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    yield from VENDOR.refuse("mla_rank", q_nope.shape[2], "kv_lora_rank is", "use the reference for this model")
    yield from VENDOR.refuse("mla_rope_dim", q_pe.shape[2], "qk_rope_head_dim is", "use the reference for this model")
    yield from VENDOR.refuse("mla_heads", q_nope.shape[1], "q_nope's heads are", "pad them, or split them otherwise")
    yield from VENDOR.refuse("mla_block_size", ckv_cache.shape[1], "tokens of a block are", "allocate blocks of 128")
    if fact("seq_lens.shape[0] > 4096", seq_lens=seq_lens):
        yield from VENDOR.refuse("batch", seq_lens.shape[0], "sequences are", "split the batch")
    if return_lse:
        yield (
            f"return_lse is True; the MLA mode of npu_fused_infer_attention_score excludes softmax_lse_flag "
            f"({VENDOR.source}): pass False"
        )


def run(
    q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
    kv_format, k_scale, k_scale_cache, return_lse,
):  # fmt: skip
    num_blocks, block_size, _ = ckv_cache.shape
    batch = None
    if 0 not in (q_nope.shape[0], *block_table.shape, num_blocks) and max_seqlen_q > 0:
        batch = host_lengths.read(op.name, block_table, seq_lens, cu_seqlens_q, block_size)
    if batch is None or batch.num_tokens == 0:  # nothing to attend to, or a sequence with evicted blocks
        return op.reference(
            q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal
        )
    return fused_infer.attend(
        q_nope, ckv_cache, ckv_cache, batch, kv_heads=1, block_size=block_size, softmax_scale=softmax_scale,
        causal=causal, return_lse=return_lse, query_rope=q_pe[: batch.num_tokens].contiguous(), key_rope=kpe_cache,
    )  # fmt: skip
