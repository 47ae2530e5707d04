"""Attention over a window of recent rows and over compressed rows, each of which is key and value of every head.

A tile is heads of one query, as in sparse_mla_attention.py. Sequences of few queries are split: one program has the
window, others a stretch of the compressed entries each, and merge_splits joins them.
"""

import triton
import triton.language as tl

from .apply_rope import turn_pairs
from .attention import online_softmax, split_tokens, store_result
from .pages import find_pages, load_rows, sequence_of


@triton.jit
def load_shared(
    codes, at, exists, code_d, scales, scale_at, scale_d, scale_part, number, rope, rope_at, coded, dim,
    BLOCK_D: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr,
    ROPE: tl.constexpr,
):  # fmt: skip
    """Rows [N, BLOCK_D] as load_rows gives them; with ROPE those from channel `coded` on stand beside, uncoded."""
    rows = load_rows(
        codes, at, exists, code_d, scales, scale_at, scale_d, scale_part, number, coded, BLOCK_D, CODE, SCALE, GROUP,
        GLOBAL,
    )  # fmt: skip
    if ROPE:
        e = tl.arange(0, BLOCK_D) - coded
        beside = (e >= 0) & (e < dim - coded)
        part = tl.load(rope + rope_at[:, None] + e[None, :], mask=exists[:, None] & beside[None, :], other=0.0)
        rows = tl.where(beside[None, :], part.to(tl.float32), rows)
    return rows


@triton.jit
def shared_kv_attention(
    q, q_t, q_h, q_d,
    w, w_b, w_s, w_h, w_d, w_scales, w_scale_b, w_scale_s, w_scale_h, w_scale_d, w_scale_part, w_scale_tokens, w_number,
    w_rope, w_rope_b, w_rope_s, w_coded, window_table, window_table_b, window_column, window_rows, window_block_size,
    c, c_b, c_s, c_h, c_d, c_scales, c_scale_b, c_scale_s, c_scale_h, c_scale_d, c_scale_part, c_scale_tokens, c_number,
    c_rope, c_rope_b, c_rope_s, c_coded, block_table, table_b, table_column, max_blocks, block_size,
    kv, kv_t, kv_d, seq_lens, cu_seqlens_q, indices, index_t, index_k, topk, sinks, cos_sin, cos_p, cos_d,
    out, lse, part_out, part_lse, num_seqs, num_heads, dim, softmax_scale, window, compress_ratio, half, decode_queries,
    W_CODE: tl.constexpr, W_SCALE: tl.constexpr, W_GROUP: tl.constexpr, W_GLOBAL: tl.constexpr, W_ROPE: tl.constexpr,
    C_CODE: tl.constexpr, C_SCALE: tl.constexpr, C_GROUP: tl.constexpr, C_GLOBAL: tl.constexpr, C_ROPE: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr, KV: tl.constexpr, ENTRIES: tl.constexpr,
    CHOSEN: tl.constexpr, SINKS: tl.constexpr, TURNS: tl.constexpr, LSE: tl.constexpr, DOT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program: (query of a short sequence or token, tile of heads, split). Outputs as in attention.store_result.

    Of a split sequence, split 0 is the window, and split s of the others has its (s - 1)th stretch of entries.
    What is summed is turned back before it is divided and the parts are joined: all of that is linear.
    """
    if SPLIT:
        sequence, query = tl.program_id(0) // decode_queries, tl.program_id(0) % decode_queries
    else:
        sequence = sequence_of(tl.program_id(0), cu_seqlens_q, num_seqs, 1, 0)
        query = tl.program_id(0) - tl.load(cu_seqlens_q + sequence)
    start = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    mine = (query < num_queries) & ((num_queries <= decode_queries) == SPLIT)
    if mine:
        own = length - num_queries + query  # negative: a query of no cached token sees nothing
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        head_exists = head < num_heads
        token = (start + query).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        q_at = q + token * q_t + head[:, None] * q_h + (d * q_d)[None, :]
        queries = tl.load(q_at, mask=head_exists[:, None] & (d < dim)[None, :], other=0.0).to(DOT)
        largest = tl.full((HEADS,), -1e30, tl.float32)
        total, sums = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, BLOCK_D), tl.float32)

        written = length  # of the window's rows; then come those of kv
        if KV:
            written = tl.maximum(length - num_queries, 0)
        low, high = tl.maximum(own - window + 1, 0), own + 1
        if SPLIT:
            high = tl.where(tl.program_id(2) == 0, high, 0)
        table = window_table + sequence.to(tl.int64) * window_table_b
        for first in range(low, high, BLOCK_N):
            p = first + tl.arange(0, BLOCK_N)
            kept = (p < high) & (p < written) & (p >= written - window_rows)
            block, offset, found = find_pages(table, window_column, p % window_rows, kept, window_block_size)
            keys = load_shared(
                w, block * w_b + offset * w_s, found, w_d, w_scales,
                block * w_scale_b + (offset // w_scale_tokens) * w_scale_s, w_scale_d, w_scale_part, w_number,
                w_rope, block * w_rope_b + offset * w_rope_s, w_coded, dim,
                BLOCK_D, W_CODE, W_SCALE, W_GROUP, W_GLOBAL, W_ROPE,
            ).to(DOT)  # fmt: skip
            if KV:
                new = (p < high) & (p >= written)
                row = (start + p - (length - num_queries)).to(tl.int64)
                new_at = kv + (row * kv_t)[:, None] + (d * kv_d)[None, :]
                rows = tl.load(new_at, mask=new[:, None] & (d < dim)[None, :], other=0.0)
                keys = tl.where(new[:, None], rows.to(DOT), keys)
                found = found | new
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * softmax_scale
            logits = tl.where(found[None, :], logits, float("-inf"))
            largest, total, sums = online_softmax(logits, keys, largest, total, sums, DOT)

        if ENTRIES:
            visible = tl.maximum(own + 1, 0) // compress_ratio
            low, high = 0, visible
            if CHOSEN:
                high = topk
            if SPLIT:
                size = split_tokens(high, MAX_SPLITS, MIN_TOKENS)
                low = (tl.program_id(2) - 1) * size
                high = tl.where(tl.program_id(2) == 0, low, tl.minimum(high, low + size))
            table = block_table + sequence.to(tl.int64) * table_b
            for first in range(low, high, BLOCK_N):
                i = first + tl.arange(0, BLOCK_N)
                j = tl.where(i < high, i, -1)
                if CHOSEN:
                    j = tl.load(indices + token * index_t + i * index_k, mask=i < high, other=-1)
                seen = (j >= 0) & (j < visible) & (j // block_size < max_blocks)
                block, offset, found = find_pages(table, table_column, j, seen, block_size)
                keys = load_shared(
                    c, block * c_b + offset * c_s, found, c_d, c_scales,
                    block * c_scale_b + (offset // c_scale_tokens) * c_scale_s, c_scale_d, c_scale_part, c_number,
                    c_rope, block * c_rope_b + offset * c_rope_s, c_coded, dim,
                    BLOCK_D, C_CODE, C_SCALE, C_GROUP, C_GLOBAL, C_ROPE,
                ).to(DOT)  # fmt: skip
                logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * softmax_scale
                logits = tl.where(found[None, :], logits, float("-inf"))
                largest, total, sums = online_softmax(logits, keys, largest, total, sums, DOT)

        if TURNS:
            sums = turn_pairs(sums, own, cos_sin, cos_p, cos_d, dim - 2 * half, half, True, HEADS, BLOCK_D)
        store_result(
            largest, total, sums, head_exists, sequence, query, token, head, sinks, out, lse, part_out, part_lse,
            num_heads, dim, decode_queries, SPLIT, SINKS, LSE, BLOCK_D,
        )  # fmt: skip
