"""torch_npu.npu_lightning_indexer. Which of equal scores is chosen is Ascend's choice until a device run shows it."""

import torch

from ...ops import _math
from . import takes
from .vendor_ops import LIGHTNING_INDEXER as VENDOR

LAST = 2**31 - 1  # sorts behind every position


def unsupported(q, weights, key_cache, k, compress_ratio, candidates, order, kv_format, **_):
    yield from VENDOR.missing()
    if kv_format != "auto":
        yield (
            f"kv_format is {kv_format!r}; npu_quant_lightning_indexer reads coded keys for coded queries alone "
            f"({VENDOR.source}): keep index keys in q's dtype"
        )
    yield from VENDOR.refuse("dtype", q.dtype, "q is", "convert it, and allocate key_cache alike")
    yield from VENDOR.refuse("weights_dtype", weights.dtype, "weights are", "convert them")
    if weights.dtype not in (q.dtype, torch.float32):
        yield f"weights are {weights.dtype} and q is {q.dtype}; {VENDOR.name} takes one dtype or float32: convert them"
    yield from VENDOR.refuse("dim", q.shape[2], "dims of an index key are", "use the reference for this model")
    yield from VENDOR.refuse("num_heads", q.shape[1], "q's heads are", "use the reference for this model")
    yield from VENDOR.refuse("k", k, "k is", "choose another k")
    if kv_format == "auto":
        yield from VENDOR.refuse("block_size", key_cache.shape[1], "keys of a block are", "allocate blocks of 128")
    yield from takes.dense(key_cache=key_cache)
    yield from takes.without(VENDOR, candidates=candidates)
    if compress_ratio != 1:
        yield f"compress_ratio is {compress_ratio}; {VENDOR.name} has a key for every token: use the reference"
    if order != "position":
        yield f"order is {order!r}; {VENDOR.name} documents no order of its result: pass 'position'"


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, k, compress_ratio, candidates,
    candidate_block_size, order, kv_format, block_size,
):  # fmt: skip
    import torch_npu

    num_tokens = q.shape[0]
    if 0 in (num_tokens, *block_table.shape, key_cache.shape[0]):
        return seq_lens.new_full((num_tokens, k), -1)
    found, _ = torch_npu.npu_lightning_indexer(
        q.contiguous(),
        key_cache[:, :, None],  # [nb, bs, 1, Di]
        weights.contiguous(),
        actual_seq_lengths_query=cu_seqlens_q[1:].contiguous(),  # running sum
        actual_seq_lengths_key=seq_lens.contiguous(),
        block_table=block_table.int().contiguous(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=k,
        sparse_mode=3,  # causal, bottom right
    )
    _, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    found = found[:, 0]  # [T, 1, k]
    used = (found >= 0) & (own >= 0)[:, None]
    ascending = torch.where(used, found, LAST).sort(-1).values
    return torch.where(ascending == LAST, -1, ascending)
