from typing import Any

import torch

from ...ops import _math, _pages
from . import launching, records
from .attending import DECODE_QUERIES, MAX_SPLITS, MIN_TOKENS, merge, parts


def unsupported(q, sinks, cos_sin, **_):
    yield from launching.floats(q=q, sinks=sinks, cos_sin=cos_sin)
    if q.shape[2] > 512:
        yield f"q has {q.shape[2]} dims; the Triton kernel takes up to 512: use the reference"
    yield from launching.even_pairs(q.shape[2], cos_sin)


def run(
    q, window_cache, window_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, window, kv, compressed_cache,
    block_table, topk_indices, compress_ratio, window_format, kv_format, sinks, cos_sin, return_lse,
):  # fmt: skip
    from ...triton.shared_kv_attention import shared_kv_attention

    num_tokens, num_heads, dim = q.shape
    out, lse = _math.nothing_seen(q, dim, return_lse)
    num_seqs = seq_lens.shape[0]
    if 0 in (num_tokens, num_heads, num_seqs) or max_seqlen_q <= 0:
        return out, lse
    entries = compressed_cache is not None and 0 not in (compressed_cache.shape[0], block_table.shape[1])
    if not entries:  # the window's stand for those that are never read
        compressed_cache, block_table, kv_format = window_cache, window_table, window_format
    recent, recent_args = pages_of(window_cache, window_format, window_table, dim, "W")
    compressed, compressed_args = pages_of(compressed_cache, kv_format, block_table, dim, "C")
    window_rows = window_table.shape[1] * recent_args[-1]
    count = block_table.shape[1] * compressed_args[-1] if topk_indices is None else topk_indices.shape[1]
    splits = 1 + (min(MAX_SPLITS - 1, launching.cdiv(count, MIN_TOKENS)) if entries else 0)
    few = min(DECODE_QUERIES, max_seqlen_q)
    part_out, part_lse = parts(q, num_seqs, splits, few, dim)
    seq_lens, cu_seqlens_q = seq_lens.contiguous(), cu_seqlens_q.contiguous()
    args = (
        q, *q.stride(), *recent_args[:-1], window_rows, recent_args[-1], *compressed_args[:-1], block_table.shape[1],
        compressed_args[-1], q if kv is None else kv, *((0, 0) if kv is None else kv.stride()), seq_lens, cu_seqlens_q,
        seq_lens if topk_indices is None else topk_indices,
        *((0, 0) if topk_indices is None else topk_indices.stride()), count,
        part_lse if sinks is None else sinks.contiguous(), part_lse if cos_sin is None else cos_sin,
        *((0, 0) if cos_sin is None else cos_sin.stride()), out, lse, part_out, part_lse, num_seqs, num_heads, dim,
        float(softmax_scale), window, compress_ratio, 0 if cos_sin is None else cos_sin.shape[1] // 2, few,
    )  # fmt: skip
    narrow = q.dtype is torch.float32 or bool(recent["W_CODE"] or compressed["C_CODE"])
    constants = dict(
        **recent, **compressed, MAX_SPLITS=MAX_SPLITS - 1, MIN_TOKENS=MIN_TOKENS, KV=kv is not None, ENTRIES=entries,
        CHOSEN=topk_indices is not None, SINKS=sinks is not None, TURNS=cos_sin is not None, LSE=return_lse,
        DOT=launching.dot_type(q.dtype), BLOCK_N=launching.keys_at_a_time(16 if narrow else 32, q.dtype),
        BLOCK_D=launching.dot_block(dim),
        num_warps=8, num_stages=1,
    )  # fmt: skip
    tiles = launching.cdiv(num_heads, 16)
    launching.launch(shared_kv_attention, (num_seqs * few, tiles, splits), *args, SPLIT=True, HEADS=16, **constants)
    if max_seqlen_q > few:
        heads = 16 if narrow or num_heads <= 16 else 32
        tiles = launching.cdiv(num_heads, heads)
        launching.launch(shared_kv_attention, (num_tokens, tiles, 1), *args, SPLIT=False, HEADS=heads, **constants)
    merge(part_out, part_lse, out, lse, seq_lens, cu_seqlens_q, sinks, whole=True)
    return out, lse


def pages_of(cache: Any, kv_format: str, table: Any, dim: int, prefix: str) -> tuple[dict[str, Any], list[Any]]:
    """Constants and arguments of one kind of pages; the last argument is the rows of a block."""
    operand, rope = records.operand(cache, kv_format, -1)
    beside = 0 if rope is None else rope.shape[2]
    strides = (0, 0) if rope is None else rope.stride()[:2]
    args = [
        *operand.rows, *operand.scales, operand.number, operand.number if rope is None else rope, *strides,
        dim - beside, table, *table.stride(), _pages.block_size_of(cache, kv_format),
    ]  # fmt: skip
    return operand.prefixed(prefix) | {f"{prefix}_ROPE": rope is not None}, args
