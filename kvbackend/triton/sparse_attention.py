"""Attention over chosen tokens of paged keys and values, plain or quantized, and over the first and last ones.

A tile is query heads of one kv head for one query, whose tokens are one list: the first ones, the last ones, then the
chosen ones. As in attention.py, sequences of few queries are split, here over these lists, and joined by merge_splits.
"""

import triton
import triton.language as tl

from .attention import capped, online_softmax, split_tokens, store_result
from .page_logits import middle_end
from .pages import find_pages, load_rows, sequence_of


@triton.jit
def sparse_attention(
    q, q_t, q_h, q_d,
    k, k_b, k_s, k_h, k_d, k_scales, k_scale_b, k_scale_s, k_scale_h, k_scale_d, k_scale_part, k_scale_tokens, k_number,
    v, v_b, v_s, v_h, v_d, v_scales, v_scale_b, v_scale_s, v_scale_h, v_scale_d, v_scale_part, v_scale_tokens, v_number,
    block_table, table_b, table_column, seq_lens, cu_seqlens_q, indices, index_t, index_h, index_k, topk, sinks,
    out, lse, part_out, part_lse,
    num_seqs, num_heads, group, dim, value_dim, block_size, softmax_scale, softcap, page_size, num_sinks, num_recent,
    decode_queries,
    K_CODE: tl.constexpr, K_SCALE: tl.constexpr, K_GROUP: tl.constexpr, K_GLOBAL: tl.constexpr,
    V_CODE: tl.constexpr, V_SCALE: tl.constexpr, V_GROUP: tl.constexpr, V_GLOBAL: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, DOT: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program: (query of a short sequence or token, tile of heads, split). Outputs as in attention.store_result."""
    if SPLIT:
        sequence, query = tl.program_id(0) // decode_queries, tl.program_id(0) % decode_queries
    else:
        sequence = sequence_of(tl.program_id(0), cu_seqlens_q, num_seqs, 1, 0)
        query = tl.program_id(0) - tl.load(cu_seqlens_q + sequence)
    start = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - start
    mine = (query < num_queries) & ((num_queries <= decode_queries) == SPLIT)
    if mine:
        own = tl.maximum(tl.load(seq_lens + sequence) - num_queries + query, -1)  # -1 sees nothing
        end = middle_end(own, num_recent, page_size).to(tl.int32)
        first_ones = tl.minimum(num_sinks, own + 1).to(tl.int32)
        last_from = tl.maximum(end, first_ones)
        always = first_ones + own + 1 - last_from
        low, high = 0, always + topk
        if own < 0:
            high = 0
        if SPLIT:
            size = split_tokens(high, MAX_SPLITS, MIN_TOKENS)
            low = tl.program_id(2) * size
            high = tl.minimum(high, low + size)
        head_tiles = tl.cdiv(group, HEADS)
        kv_head = (tl.program_id(1) // head_tiles).to(tl.int64)
        in_group = tl.program_id(1) % head_tiles * HEADS + tl.arange(0, HEADS)
        head_exists = in_group < group
        head = kv_head * group + in_group
        token = (start + query).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        q_at = q + token * q_t + head[:, None] * q_h + (d * q_d)[None, :]
        queries = tl.load(q_at, mask=head_exists[:, None] & (d < dim)[None, :], other=0.0).to(DOT)
        table = block_table + sequence.to(tl.int64) * table_b
        chosen = indices + token * index_t + kv_head * index_h
        largest = tl.full((HEADS,), -1e30, tl.float32)
        total, sums = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, BLOCK_V), tl.float32)
        for first in range(low, high, BLOCK_N):
            i = first + tl.arange(0, BLOCK_N)
            c = tl.load(chosen + (i - always).to(tl.int64) * index_k, mask=(i >= always) & (i < high), other=-1)
            c = tl.where((c >= num_sinks) & (c < end), c, -1).to(tl.int32)  # others count as first and last ones
            j = tl.where(i < first_ones, i, tl.where(i < always, last_from + i - first_ones, c))
            block, offset, found = find_pages(table, table_column, j, (i < high) & (j >= 0), block_size)
            keys = load_rows(
                k, block * k_b + offset * k_s + kv_head * k_h, found, k_d, k_scales,
                block * k_scale_b + (offset // k_scale_tokens) * k_scale_s + kv_head * k_scale_h, k_scale_d,
                k_scale_part, k_number, dim, BLOCK_D, K_CODE, K_SCALE, K_GROUP, K_GLOBAL,
            ).to(DOT)  # fmt: skip
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * softmax_scale
            if SOFTCAP:
                logits = capped(logits, softcap)
            logits = tl.where(found[None, :], logits, float("-inf"))
            values = load_rows(
                v, block * v_b + offset * v_s + kv_head * v_h, found, v_d, v_scales,
                block * v_scale_b + (offset // v_scale_tokens) * v_scale_s + kv_head * v_scale_h, v_scale_d,
                v_scale_part, v_number, value_dim, BLOCK_V, V_CODE, V_SCALE, V_GROUP, V_GLOBAL,
            )  # fmt: skip
            largest, total, sums = online_softmax(logits, values, largest, total, sums, DOT)
        store_result(
            largest, total, sums, head_exists, sequence, query, token, head, sinks, out, lse, part_out, part_lse,
            num_heads, value_dim, decode_queries, SPLIT, SINKS, LSE, BLOCK_V,
        )  # fmt: skip
