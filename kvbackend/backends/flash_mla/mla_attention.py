"""flash_mla_with_kvcache without indices: decoding, each query as a sequence of its own."""

import torch

from ...ops import _math
from .. import latent, single_queries
from .vendor import DENSE_DECODE as VENDOR


def unsupported(q_nope, q_pe, ckv_cache, kpe_cache, seq_lens, kv_format, **_):
    yield from VENDOR.missing()
    yield from VENDOR.plain(kv_format)
    yield from VENDOR.refuse("dtype", q_nope.dtype, "q_nope is", "convert it, and allocate the caches alike")
    yield from VENDOR.refuse("rank", q_nope.shape[2], "kv_lora_rank is", "use backend 'cuda_triton'")
    yield from VENDOR.refuse("rope_dim", q_pe.shape[2], "qk_rope_head_dim is", "use backend 'cuda_triton'")
    yield from VENDOR.refuse("num_heads", q_nope.shape[1], "q_nope's heads are", "split them over devices")
    yield from VENDOR.refuse("block_size", ckv_cache.shape[1], "tokens of a block are", "allocate blocks of 64")
    yield from latent.separate(VENDOR.name, ckv_cache, kpe_cache)
    if single_queries.is_prefill("q_nope", q_nope, seq_lens):
        yield (
            f"q_nope has more than {single_queries.MOST} queries for each sequence; FlashMLA's dense kernel for one kv "
            f"head decodes: use backend 'cuda_triton'"
        )


def run(
    q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
    kv_format, k_scale, k_scale_cache, return_lse,
):  # fmt: skip
    import flash_mla

    num_tokens, _, rank = q_nope.shape
    if 0 in (num_tokens, *block_table.shape, ckv_cache.shape[0]) or max_seqlen_q <= 0:
        return _math.nothing_seen(q_nope, rank, return_lse)
    batch = single_queries.expand(
        block_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens, ckv_cache.shape[1], causal
    )
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=latent.query(q_nope, q_pe)[:, None],  # [T, 1, H, 576]: T sequences of one query
        k_cache=latent.joined(ckv_cache, kpe_cache)[:, :, None],  # [nb, 64, 1, 576]
        block_table=batch.block_table,
        cache_seqlens=batch.lengths,
        head_dim_v=rank,
        tile_scheduler_metadata=flash_mla.get_mla_metadata()[0],  # filled at the call, from lengths on the device
        softmax_scale=softmax_scale,
    )
    lse = lse[..., 0] if return_lse else q_nope.new_empty(0, dtype=torch.float32)  # [T, H, 1], natural logarithm
    return batch.results(out[:, 0], lse)
