"""trtllm_batch_decode_with_kv_cache_mla for decoding, each query as a sequence; else BatchMLAPagedAttentionWrapper."""

import torch

from ...ops import _math, registry
from .. import latent, single_queries
from . import conventions, planned
from .vendor import MLA_DECODE, MLA_PREFILL

op = registry["mla_attention"]
NOPE_DIM = 128  # of a head before absorption; trtllm-gen does not read it


def unsupported(q_nope, q_pe, ckv_cache, kpe_cache, seq_lens, kv_format, return_lse, **_):
    prefill = single_queries.is_prefill("q_nope", q_nope, seq_lens)
    vendor = MLA_PREFILL if prefill else MLA_DECODE
    yield from vendor.missing()
    yield from vendor.plain(kv_format)
    yield from vendor.refuse("dtype", q_nope.dtype, "q_nope is", "convert it, and allocate the caches alike")
    yield from vendor.refuse("rank", q_nope.shape[2], "kv_lora_rank is", "use backend 'cuda_triton'")
    yield from vendor.refuse("rope_dim", q_pe.shape[2], "qk_rope_head_dim is", "use backend 'cuda_triton'")
    if prefill:
        if ckv_cache.stride(2) != 1 or kpe_cache.stride(2) != 1:
            yield f"ckv_cache or kpe_cache has numbers apart; {vendor.name} takes whole rows: make it contiguous"
        return
    yield from vendor.refuse("num_heads", q_nope.shape[1], "q_nope's heads are", "split them over devices")
    yield from vendor.refuse("block_size", ckv_cache.shape[1], "tokens of a block are", "allocate blocks of 64")
    yield from latent.separate(vendor.name, ckv_cache, kpe_cache)
    if return_lse:
        yield f"return_lse is True; the base of {vendor.name}'s lse is not documented ({vendor.source}): pass False"


def run(
    q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
    kv_format, k_scale, k_scale_cache, return_lse,
):  # fmt: skip
    num_tokens, block_size = q_nope.shape[0], ckv_cache.shape[1]
    batch = block_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens, block_size, causal
    if 0 in (num_tokens, *block_table.shape, ckv_cache.shape[0]) or max_seqlen_q <= 0:
        return _math.nothing_seen(q_nope, q_nope.shape[2], return_lse)
    if num_tokens <= single_queries.MOST * seq_lens.shape[0]:
        return decode(q_nope, q_pe, ckv_cache, kpe_cache, single_queries.expand(*batch), softmax_scale)
    plan = planned.read(op.name, *batch)
    if plan is None:
        return op.reference(
            q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale,
            causal, return_lse=return_lse,
        )  # fmt: skip
    return prefill(q_nope, q_pe, ckv_cache, kpe_cache, plan, softmax_scale, causal, return_lse)


def decode(q_nope, q_pe, ckv_cache, kpe_cache, batch, softmax_scale):
    import flashinfer

    block_size, rank = ckv_cache.shape[1:]
    out = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
        query=latent.query(q_nope, q_pe)[:, None],  # [T, 1, H, 576]
        kv_cache=latent.joined(ckv_cache, kpe_cache),
        workspace_buffer=conventions.workspace(q_nope.device),
        qk_nope_head_dim=NOPE_DIM,
        kv_lora_rank=rank,
        qk_rope_head_dim=kpe_cache.shape[2],
        block_tables=batch.block_table,
        seq_lens=batch.lengths,
        max_seq_len=batch.block_table.shape[1] * block_size,
        bmm1_scale=softmax_scale,
        bmm2_scale=1.0,
        backend="trtllm-gen",  # takes tables of any width
    )
    return batch.results(out[:, 0], q_nope.new_empty(0, dtype=torch.float32))


def prefill(q_nope, q_pe, ckv_cache, kpe_cache, batch, softmax_scale, causal, return_lse):
    import flashinfer

    num_tokens, num_heads, rank = q_nope.shape
    wrapper = conventions.wrapper(flashinfer.mla.BatchMLAPagedAttentionWrapper, q_nope.device)
    wrapper.plan(
        qo_indptr=batch.qo_indptr,
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        kv_len_arr=batch.kv_lens,
        num_heads=num_heads,
        head_dim_ckv=rank,
        head_dim_kpe=q_pe.shape[2],
        page_size=ckv_cache.shape[1],
        causal=causal,
        sm_scale=softmax_scale,
        q_data_type=q_nope.dtype,
        kv_data_type=ckv_cache.dtype,
    )
    used = batch.num_tokens
    result = wrapper.run(
        q_nope=q_nope[:used].contiguous(), q_pe=q_pe[:used].contiguous(), ckv_cache=ckv_cache, kpe_cache=kpe_cache,
        return_lse=return_lse,
    )  # fmt: skip
    out, lse = result if return_lse else (result, q_nope.new_empty(0, dtype=torch.float32))
    return batch.results(out, conventions.natural(lse), num_tokens)
