"""trtllm_batch_decode_with_kv_cache for decoding, each query a sequence; else BatchPrefillWithPagedKVCacheWrapper."""

import torch

from ...ops import _math, registry
from .. import nvidia, single_queries
from . import conventions, planned
from .vendor import DECODE, PREFILL

op = registry["paged_attention"]
XQA = (9, 12)  # major compute capabilities where it decodes: without lse
FA3 = 9  # where FlashAttention 3 reads pages: with one set of strides for keys and values, as XQA does


def unsupported(
    q, key_cache, value_cache, seq_lens, window, softcap, sinks, kv_format, key_positions, rope_cos_sin, key_bias,
    return_lse, **_,
):  # fmt: skip
    prefill = single_queries.is_prefill("q", q, seq_lens)
    vendor = PREFILL if prefill else DECODE
    yield from vendor.missing()
    yield from vendor.plain(kv_format)
    yield from vendor.refuse("dtype", q.dtype, "q is", "convert it, and allocate the caches alike")
    yield from vendor.without(key_positions=key_positions, rope_cos_sin=rope_cos_sin, key_bias=key_bias)
    head_dim, value_dim = q.shape[2], value_cache.shape[3]
    major = nvidia.capability()[0]
    strides = [tuple(cache.stride(dim) for dim in range(4)) for cache in (key_cache, value_cache)]
    alike = strides[0] == strides[1] or (prefill and major != FA3)
    if not alike or strides[0][3] != 1 or strides[1][3] != 1:
        yield (
            f"key_cache and value_cache have strides {strides[0]} and {strides[1]}; {vendor.name} takes equal ones on "
            f"this GPU, the last 1 ({vendor.source}): allocate them alike"
        )
    if prefill:
        yield from vendor.refuse("dims", (head_dim, value_dim), "dims of keys and values are", "use 'cuda_triton'")
        yield from vendor.without(sinks=sinks)
        return
    yield from vendor.refuse("head_dim", head_dim, "dims of a head are", "use backend 'cuda_triton'")
    yield from vendor.refuse("group", q.shape[1] // key_cache.shape[2], "query heads of a kv head are", "split them")
    yield from vendor.refuse("block_size", key_cache.shape[1], "tokens of a block are", "allocate blocks of 16 to 64")
    if value_dim != head_dim:
        yield f"value_cache has {value_dim} dims and q {head_dim}; {vendor.name} takes equal ones ({vendor.source})"
    if window > 0:
        yield (
            f"window is {window}; {vendor.name} counts it over the blocks that a table holds, and whether one is freed "
            f"is not known on the host: use backend 'cuda_triton'"
        )
    if softcap > 0:
        yield f"softcap is {softcap}; {vendor.name} has none ({vendor.source}): use backend 'cuda_triton'"
    if return_lse and sinks is not None:
        yield f"return_lse is True with sinks; whether {vendor.name}'s lse counts them is not documented: ask for one"
    if return_lse and major in XQA:
        yield f"return_lse is True; {vendor.name} returns none on this GPU ({vendor.source}): pass False"


def run(
    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window,
    softcap, sinks, k_scale, v_scale, k_scale_cache, v_scale_cache, kv_format, key_positions, rope_cos_sin,
    rope_interleaved, key_bias, return_lse,
):  # fmt: skip
    batch = q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal
    if 0 in (q.shape[0], *block_table.shape, key_cache.shape[0]) or max_seqlen_q <= 0:
        return _math.nothing_seen(q, value_cache.shape[3], return_lse)
    if q.shape[0] <= single_queries.MOST * seq_lens.shape[0]:
        return decode(*batch, sinks, return_lse)
    return prefill(*batch, window, softcap, return_lse)


def decode(
    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, sinks,
    return_lse,
):  # fmt: skip
    import flashinfer

    block_size = key_cache.shape[1]
    batch = single_queries.expand(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], block_size, causal)
    result = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        query=q.contiguous(),
        kv_cache=(key_cache, value_cache),
        workspace_buffer=conventions.workspace(q.device),
        block_tables=batch.block_table,
        seq_lens=batch.lengths,
        max_seq_len=block_table.shape[1] * block_size,
        bmm1_scale=softmax_scale,
        bmm2_scale=1.0,
        sinks=None if sinks is None else sinks.float(),
        kv_layout="NHD",
        return_lse=return_lse,
    )
    out, lse = result if return_lse else (result, q.new_empty(0, dtype=torch.float32))
    return batch.results(out, conventions.natural(lse))


def prefill(
    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window,
    softcap, return_lse,
):  # fmt: skip
    import flashinfer

    num_tokens, num_heads, head_dim = q.shape
    block_size, kv_heads = key_cache.shape[1:3]
    batch = planned.read(
        op.name, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens, block_size, causal, window
    )
    if batch is None:
        return op.reference(
            q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window,
            softcap, return_lse=return_lse,
        )  # fmt: skip
    wrapper = conventions.wrapper(flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper, q.device, "NHD")
    wrapper.plan(
        qo_indptr=batch.qo_indptr,
        paged_kv_indptr=batch.kv_indptr,
        paged_kv_indices=batch.kv_indices,
        paged_kv_last_page_len=(batch.kv_lens - 1) % block_size + 1,
        num_qo_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim_qk=head_dim,
        page_size=block_size,
        head_dim_vo=value_cache.shape[3],
        causal=causal,
        sm_scale=softmax_scale,
        window_left=window - 1 if window > 0 else -1,  # inclusive
        logits_soft_cap=softcap,
        q_data_type=q.dtype,
        kv_data_type=key_cache.dtype,
    )
    result = wrapper.run(
        q=q[: batch.num_tokens].contiguous(), paged_kv_cache=(key_cache, value_cache), return_lse=return_lse
    )
    out, lse = result if return_lse else (result, q.new_empty(0, dtype=torch.float32))
    return batch.results(out, conventions.natural(lse), num_tokens)
