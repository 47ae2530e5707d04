"""torch_npu.npu_sparse_flash_attention, and npu_kv_quant_sparse_flash_attention where the pages are fp8 records."""

import torch

from ...ops import _math, _pages
from . import takes
from .vendor_ops import KV_QUANT_SPARSE_FLASH_ATTENTION as QUANTIZED
from .vendor_ops import SPARSE_FLASH_ATTENTION as PLAIN

RECORD = "v32_fp8_656_ascend"
MLA_ABSORBED = 2  # the only attention_mode that is accepted; the default, 0, is not
CAUSAL, AS_CHOSEN = 3, 0  # sparse_mode
PER_TOKEN_TILE = 2  # quantization of the records: one scale for 128 dims of a token, stored behind them


def unsupported(q_nope, q_pe, ckv_cache, kpe_cache, topk_indices, kv_format, block_size, return_lse, **_):
    if kv_format == "auto":
        vendor, rows = PLAIN, ckv_cache.shape[1]
        yield from vendor.missing()
        yield from vendor.refuse("rank", q_nope.shape[2], "kv_lora_rank is", "use the reference for this model")
        yield from vendor.refuse("rope_dim", q_pe.shape[2], "qk_rope_head_dim is", "use the reference for this model")
    elif kv_format == RECORD:
        vendor, rows = QUANTIZED, _pages.block_size_of(ckv_cache, kv_format, block_size)
        yield from vendor.missing()
    else:
        yield (
            f"kv_format is {kv_format!r}; Ascend's kernel reads 'auto' and {RECORD!r}, whose scales come last "
            f"({QUANTIZED.source}): write the cache in one of these"
        )
        return
    if vendor.is_here():
        yield from vendor.refuse("dtype", q_nope.dtype, "q_nope is", "convert it, and a plain cache alike")
        yield from vendor.refuse("num_heads", q_nope.shape[1], "q_nope's heads are", "pad or split them")
        yield from vendor.refuse("block_size", rows, "tokens of a block are", "allocate blocks of 128")
    yield from takes.dense(ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    if topk_indices.shape[1] == 0:
        yield f"topk_indices chooses 0 tokens; {vendor.name} takes at least 1 ({vendor.source}): skip the call"
    if return_lse:
        yield f"return_lse is True; {vendor.name} returns none for a paged cache ({vendor.source}): pass False"


def run(
    q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, softmax_scale,
    causal, kv_format, block_size, return_lse,
):  # fmt: skip
    import torch_npu

    no_lse = q_nope.new_empty(0, dtype=torch.float32)
    if 0 in (q_nope.shape[0], *block_table.shape, ckv_cache.shape[0]):
        return torch.zeros_like(q_nope), no_lse
    rows = _pages.block_size_of(ckv_cache, kv_format, block_size)
    sequence, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, topk_indices.shape[0])
    last = own if causal else torch.where(own >= 0, seq_lens[sequence].long() - 1, -1)
    indices = packed(topk_indices, last, sequence, block_table, rows)
    batch = dict(
        block_table=block_table.int().contiguous(),
        actual_seq_lengths_query=cu_seqlens_q[1:].contiguous(),  # running sum
        actual_seq_lengths_kv=seq_lens.contiguous(),  # of each sequence, since the cache is paged
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=CAUSAL if causal else AS_CHOSEN,
        attention_mode=MLA_ABSORBED,
    )
    if kv_format == "auto":
        ckv = ckv_cache[:, :, None]  # [nb, bs, 1, kv_lora_rank]: one kv head
        out, *_ = torch_npu.npu_sparse_flash_attention(
            q_nope.contiguous(), ckv, ckv, indices[:, None], softmax_scale,
            query_rope=q_pe.contiguous(), key_rope=kpe_cache[:, :, None], **batch,
        )  # fmt: skip
    else:
        records = ckv_cache.view(torch.float8_e4m3fn).view(ckv_cache.shape[0], rows, 1, -1)
        out = torch_npu.npu_kv_quant_sparse_flash_attention(
            torch.cat((q_nope, q_pe), -1), records, records, indices[:, None], softmax_scale,
            PER_TOKEN_TILE, PER_TOKEN_TILE, **batch,
        )  # fmt: skip
    return out.masked_fill((indices[:, :1] < 0)[..., None], 0), no_lse  # a query of no token gives 0


def packed(topk_indices, last, sequence, block_table, block_size):
    """Indices [T, topk] that exist and are at most a row's `last`, first in each row as kernels want them, then -1."""
    column = topk_indices // block_size
    exists = (topk_indices >= 0) & (topk_indices <= last[:, None]) & (column < block_table.shape[1])
    block = block_table[sequence].gather(1, column.masked_fill(~exists, 0).long())
    return torch.where(exists & (block >= 0), topk_indices, -1).sort(-1, descending=True).values
