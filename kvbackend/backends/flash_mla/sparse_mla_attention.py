"""flash_mla_sparse_fwd over plain rows, flash_mla_with_kvcache with indices over DeepSeek-V3.2's fp8 records."""

import torch

from ...ops import _math, _pages
from .. import latent
from . import sparse
from .vendor import SPARSE_DECODE, SPARSE_PREFILL

RECORD = "v32_fp8_656"


def unsupported(q_nope, q_pe, ckv_cache, kpe_cache, topk_indices, kv_format, **_):
    if kv_format == "auto":
        vendor = SPARSE_PREFILL
        yield from vendor.missing()
        yield from vendor.refuse("rank", q_nope.shape[2], "kv_lora_rank is", "use backend 'cuda_triton'")
        yield from vendor.refuse("rope_dim", q_pe.shape[2], "qk_rope_head_dim is", "use backend 'cuda_triton'")
        yield from latent.separate(vendor.name, ckv_cache, kpe_cache)
    elif kv_format == RECORD:
        vendor = SPARSE_DECODE
        yield from vendor.missing()
        if not ckv_cache.is_contiguous():
            yield f"ckv_cache is strided; {vendor.name} reads whole pages ({vendor.source}): make it contiguous"
    else:
        yield (
            f"kv_format is {kv_format!r}; FlashMLA's sparse kernels read 'auto' and {RECORD!r} "
            f"({SPARSE_DECODE.source}): write the cache in one of these"
        )
        return
    yield from vendor.refuse("dtype", q_nope.dtype, "q_nope is", "convert it, and a plain cache alike")
    yield from vendor.refuse("num_heads", q_nope.shape[1], "q_nope's heads are", "split them over devices")
    if topk_indices.shape[1] == 0:
        yield f"topk_indices chooses 0 tokens; {vendor.name} takes at least 1 ({vendor.source}): skip the call"


def run(
    q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, softmax_scale,
    causal, kv_format, block_size, return_lse,
):  # fmt: skip
    num_tokens, num_heads, rank = q_nope.shape
    if 0 in (num_tokens, *block_table.shape, ckv_cache.shape[0]) or max_seqlen_q <= 0:
        return _math.nothing_seen(q_nope, rank, return_lse)
    rows = _pages.block_size_of(ckv_cache, kv_format, block_size)
    sequence, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    last = own if causal else torch.where(own >= 0, seq_lens[sequence].long() - 1, -1)
    seen = (topk_indices >= 0) & (topk_indices <= last[:, None])
    slots = sparse.slots_of(topk_indices, seen, block_table[sequence], rows)
    q = latent.query(q_nope, q_pe)
    if kv_format == RECORD:
        pages = ckv_cache.view(ckv_cache.shape[0], rows, 1, -1)
        return sparse.cleaned(*sparse.decode(q, [(pages, slots)], softmax_scale), return_lse)
    import flash_mla

    kv = latent.joined(ckv_cache, kpe_cache).flatten(0, 1)[:, None]  # [nb * bs, 1, 576]: one kv head
    out, _, lse = flash_mla.flash_mla_sparse_fwd(
        q=sparse.heads_padded(q), kv=kv, indices=sparse.aligned(slots), sm_scale=softmax_scale, d_v=rank
    )
    return sparse.cleaned(out[:, :num_heads], lse[:, :num_heads], return_lse)
