"""torch_npu.npu_lightning_indexer for a key of each token, CANN's own lightning_indexer for compressed ones.

Which of equal scores is chosen is Ascend's choice until a device run shows it.
"""

import torch

from ...facts import fact
from ...ops import _math
from . import cann_ops, takes
from .vendor_ops import LIGHTNING_INDEXER as PLAIN
from .vendor_ops import LIGHTNING_INDEXER_V2 as COMPRESSED

LAST = 2**31 - 1  # sorts behind every position


CAUSAL = 3  # sparse_mode and mask_mode: queries are the last tokens of their sequences


def unsupported(q, weights, key_cache, seq_lens, k, compress_ratio, candidates, order, kv_format, **_):
    vendor = PLAIN if compress_ratio == 1 else COMPRESSED
    yield from vendor.missing()
    if kv_format != "auto":
        yield (
            f"kv_format is {kv_format!r}; Ascend's quantized indexers read coded keys for coded queries alone "
            f"({PLAIN.source}): keep index keys in q's dtype"
        )
    yield from vendor.refuse("dtype", q.dtype, "q is", "convert it, and allocate key_cache alike")
    if vendor is PLAIN:
        yield from vendor.refuse("weights_dtype", weights.dtype, "weights are", "convert them")
        if weights.dtype not in (q.dtype, torch.float32):
            yield (
                f"weights are {weights.dtype} and q is {q.dtype}; {vendor.name} takes one dtype or float32: "
                f"convert them"
            )
    else:  # takes float32 weights, which any are made here
        yield from vendor.refuse("ratio", compress_ratio, "compress_ratio is", "use the reference for this model")
        if fact("seq_lens.shape[0] > 65535", seq_lens=seq_lens):
            yield from vendor.refuse("batch", seq_lens.shape[0], "sequences are", "split the batch")
    yield from vendor.refuse("dim", q.shape[2], "dims of an index key are", "use the reference for this model")
    yield from vendor.refuse("num_heads", q.shape[1], "q's heads are", "use the reference for this model")
    yield from vendor.refuse("k", k, "k is", "choose another k")
    if kv_format == "auto":
        yield from vendor.refuse("block_size", key_cache.shape[1], "keys of a block are", "allocate blocks of 128")
    yield from takes.dense(key_cache=key_cache)
    yield from takes.without(vendor, candidates=candidates)
    if order != "position":
        yield f"order is {order!r}; {vendor.name} documents no order of its result: pass 'position'"


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, k, compress_ratio, candidates,
    candidate_block_size, order, kv_format, block_size,
):  # fmt: skip
    num_tokens = q.shape[0]
    if 0 in (num_tokens, *block_table.shape, key_cache.shape[0]):
        return seq_lens.new_full((num_tokens, k), -1)
    choose = _among_tokens if compress_ratio == 1 else _among_entries
    keys, table = key_cache[:, :, None], block_table.int().contiguous()  # [nb, bs, 1, Di]
    found = choose(q.contiguous(), weights, keys, table, seq_lens, cu_seqlens_q, k, compress_ratio)
    _, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    found = found[:, 0]  # [T, 1, k]
    used = (found >= 0) & (own >= 0)[:, None]
    ascending = torch.where(used, found, LAST).sort(-1).values
    return torch.where(ascending == LAST, -1, ascending)


def _among_tokens(q, weights, keys, table, seq_lens, cu_seqlens_q, k, _):
    import torch_npu

    found, _ = torch_npu.npu_lightning_indexer(
        q,
        keys,
        weights.contiguous(),
        actual_seq_lengths_query=cu_seqlens_q[1:].contiguous(),  # running sum
        actual_seq_lengths_key=seq_lens.contiguous(),
        block_table=table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=k,
        sparse_mode=CAUSAL,
    )
    return found


def _among_entries(q, weights, keys, table, seq_lens, cu_seqlens_q, k, ratio):
    shared = dict(
        cu_seqlens_q=cu_seqlens_q.contiguous(),
        seqused_k=seq_lens // ratio,
        cmp_residual_k=seq_lens % ratio,
        layout_q="TND",
        layout_k="PA_BBND",
        mask_mode=CAUSAL,
        cmp_ratio=ratio,
    )
    heads, dim = q.shape[1:]
    metadata = cann_ops.op("lightning_indexer_metadata")(heads, 1, dim, k, batch_size=seq_lens.shape[0], **shared)
    found, _ = cann_ops.op("lightning_indexer")(
        q, keys, weights.float().contiguous(), k, block_table=table, metadata=metadata, **shared
    )
    return found
