"""Attention from the queries of a varlen batch to keys and values in pages, plain or quantized: MHA, GQA, MQA and MLA.

A tile of BLOCK_M rows holds HEADS query heads of one kv head for BLOCK_M // HEADS neighbouring queries of one sequence,
so that each key is loaded once for all of them. Two kinds of tile, and a sequence's kind depends on nothing but how
many queries it has:

    SPLIT     all its queries fit in one tile (decode). Its keys are cut into splits, one program each, and merge_splits
              joins the parts. The size of a split follows from the sequence's own length.
    not       one program walks all keys of its tile (prefill).

So a row's sums are made in one order, whatever else is in the batch.
"""

import triton
import triton.language as tl

from .codecs import cast
from .merge_attn_states import with_sinks
from .pages import find_pages, load_rows, sequence_of


@triton.jit
def split_tokens(length, MAX_SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr):
    """Keys of one split of a sequence: MIN_TOKENS, or more where MAX_SPLITS would not do; a multiple of MIN_TOKENS."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, MAX_SPLITS), MIN_TOKENS), 1) * MIN_TOKENS


@triton.jit
def capped(logits, softcap):
    """softcap * tanh(logits / softcap)."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp(logits * (2.0 / softcap))))


@triton.jit
def online_softmax(logits, values, largest, total, sums, DOT: tl.constexpr):
    """One step over logits [M, N], -inf where masked, and values [N, D]: new (largest [M], total [M], sums [M, D])."""
    new = tl.maximum(largest, tl.max(logits, axis=1))
    weights = tl.exp(logits - new[:, None])
    kept = tl.exp(largest - new)
    total = total * kept + tl.sum(weights, axis=1)
    sums = tl.dot(weights.to(DOT), values.to(DOT), sums * kept[:, None], input_precision="ieee")
    return new, total, sums


@triton.jit
def store_result(
    largest, total, sums, exists, sequence, query, token, head, sinks, out, lse, part_out, part_lse, num_heads,
    value_dim, decode_queries,
    SPLIT: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What online_softmax found for rows that exist [M] of queries and heads: the end of every attention kernel.

    out, lse               dense [T, H, value_dim] and [T, H], written where not SPLIT
    part_out, part_lse     [sequence, split, query of the sequence, head(, value_dim)], written where SPLIT
    """
    some = tl.where(total == 0.0, 1.0, total)
    result = sums / some[:, None]
    row_lse = tl.where(total == 0.0, float("-inf"), largest + tl.log(some))
    c = tl.arange(0, BLOCK_V)
    written = exists[:, None] & (c < value_dim)[None, :]
    if SPLIT:
        part = (sequence.to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * decode_queries + query
        part = part * num_heads + head
        tl.store(part_out + part[:, None] * value_dim + c[None, :], result, mask=written)
        tl.store(part_lse + part, row_lse, mask=exists)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
            result = with_sinks(result, row_lse, sink)
        at = token * num_heads + head
        if LSE:
            tl.store(lse + at, row_lse, mask=exists)
        tl.store(out + at[:, None] * value_dim + c[None, :], cast(result, out.dtype.element_ty), mask=written)


@triton.jit
def attention(
    q, q_t, q_h, q_d, q_pe, q_pe_t, q_pe_h, q_pe_d,
    k, k_b, k_s, k_h, k_d, k_scales, k_scale_b, k_scale_s, k_scale_h, k_scale_d, k_scale_part, k_scale_tokens, k_number,
    v, v_b, v_s, v_h, v_d, v_scales, v_scale_b, v_scale_s, v_scale_h, v_scale_d, v_scale_part, v_scale_tokens, v_number,
    k_pe, k_pe_b, k_pe_s, k_pe_d,
    block_table, table_b, table_column, seq_lens, cu_seqlens_q,
    positions, position_b, position_s, bias, bias_b, bias_s, bias_h, sinks,
    out, lse, part_out, part_lse,
    num_seqs, num_heads, group, dim, value_dim, pe_dim, block_size, softmax_scale, softcap, window, decode_queries,
    K_CODE: tl.constexpr, K_SCALE: tl.constexpr, K_GROUP: tl.constexpr, K_GLOBAL: tl.constexpr,
    V_CODE: tl.constexpr, V_SCALE: tl.constexpr, V_GROUP: tl.constexpr, V_GLOBAL: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr, LATENT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, POSITIONS: tl.constexpr, BIAS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, DOT: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_PE: tl.constexpr,
):  # fmt: skip
    """Program: (sequence or tile of queries, tile of heads, split). Outputs as in store_result.

    LATENT   MLA: the value is the key's first part, k; the second part, k_pe, has a query part of its own
    """
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    if SPLIT:
        sequence = tl.program_id(0)
        first_query = 0
    else:
        sequence = sequence_of(tl.program_id(0), cu_seqlens_q, num_seqs, QUERIES, 1)
        first_query = (tl.program_id(0) - tl.load(cu_seqlens_q + sequence) // QUERIES - sequence) * QUERIES
    start = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    if SPLIT:
        mine = (num_queries > 0) & (num_queries <= decode_queries)
    else:
        mine = (num_queries > decode_queries) & (first_query < num_queries)
    size = split_tokens(length, MAX_SPLITS, MIN_TOKENS)
    if SPLIT:
        mine = mine & (tl.program_id(2) * size < length)
    if mine:
        head_tiles = tl.cdiv(group, HEADS)
        kv_head = (tl.program_id(1) // head_tiles).to(tl.int64)
        m = tl.arange(0, BLOCK_M)
        query = first_query + m // HEADS
        in_group = tl.program_id(1) % head_tiles * HEADS + m % HEADS
        row_exists = (query < num_queries) & (m < QUERIES * HEADS) & (in_group < group)
        head = kv_head * group + in_group
        token = (start + query).to(tl.int64)
        index = length - num_queries + query  # of the query within its sequence; negative where it has no key
        sees = row_exists & (index >= 0)
        table = block_table + sequence.to(tl.int64) * table_b
        position = index
        if POSITIONS:
            of_query, row_of_query, known = find_pages(table, table_column, index, sees, block_size)
            own = tl.load(positions + of_query * position_b + row_of_query * position_s, mask=known, other=0)
            position = own.to(tl.int32)

        low, high = 0, length
        if CAUSAL and not POSITIONS:
            high = tl.minimum(length, length - num_queries + first_query + QUERIES)
        if WINDOW and not POSITIONS:
            low = tl.maximum(length - num_queries + first_query - window + 1, 0) // BLOCK_N * BLOCK_N
        if SPLIT:
            low = tl.maximum(low, tl.program_id(2) * size)
            high = tl.minimum(high, (tl.program_id(2) + 1) * size)

        d = tl.arange(0, BLOCK_D)
        q_mask = row_exists[:, None] & (d < dim)[None, :]
        query_rows = tl.load(q + (token * q_t + head * q_h)[:, None] + (d * q_d)[None, :], mask=q_mask, other=0.0)
        query_rows = query_rows.to(DOT)
        if LATENT:
            e = tl.arange(0, BLOCK_PE)
            pe_at = (token * q_pe_t + head * q_pe_h)[:, None] + (e * q_pe_d)[None, :]
            pe_rows = tl.load(q_pe + pe_at, mask=row_exists[:, None] & (e < pe_dim)[None, :], other=0.0).to(DOT)

        largest = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: -inf less -inf is NaN
        total = tl.zeros((BLOCK_M,), tl.float32)
        sums = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        for first in range(low, high, BLOCK_N):
            j = first + tl.arange(0, BLOCK_N)
            block, offset, found = find_pages(table, table_column, j, j < high, block_size)
            keys = load_rows(
                k, block * k_b + offset * k_s + kv_head * k_h, found, k_d, k_scales,
                block * k_scale_b + (offset // k_scale_tokens) * k_scale_s + kv_head * k_scale_h, k_scale_d,
                k_scale_part, k_number, dim, BLOCK_D, K_CODE, K_SCALE, K_GROUP, K_GLOBAL,
            ).to(DOT)  # fmt: skip
            logits = tl.dot(query_rows, tl.trans(keys), input_precision="ieee")
            if LATENT:
                rotary_at = (block * k_pe_b + offset * k_pe_s)[:, None] + (e * k_pe_d)[None, :]
                rotary = tl.load(k_pe + rotary_at, mask=found[:, None] & (e < pe_dim)[None, :], other=0.0).to(DOT)
                logits = tl.dot(pe_rows, tl.trans(rotary), logits, input_precision="ieee")
            logits = logits * softmax_scale
            if SOFTCAP:
                logits = capped(logits, softcap)
            if BIAS:
                added = tl.load(bias + block * bias_b + offset * bias_s + kv_head * bias_h, mask=found, other=0.0)
                logits = logits + added[None, :]
            key_position = j
            if POSITIONS:
                key_position = tl.load(positions + block * position_b + offset * position_s, mask=found, other=0)
                key_position = key_position.to(tl.int32)
            seen = found[None, :] & sees[:, None]
            if CAUSAL:
                seen = seen & (key_position[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (key_position[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
            if LATENT:
                largest, total, sums = online_softmax(logits, keys, largest, total, sums, DOT)
            else:
                values = load_rows(
                    v, block * v_b + offset * v_s + kv_head * v_h, found, v_d, v_scales,
                    block * v_scale_b + (offset // v_scale_tokens) * v_scale_s + kv_head * v_scale_h, v_scale_d,
                    v_scale_part, v_number, value_dim, BLOCK_V, V_CODE, V_SCALE, V_GROUP, V_GLOBAL,
                )  # fmt: skip
                largest, total, sums = online_softmax(logits, values, largest, total, sums, DOT)

        store_result(
            largest, total, sums, row_exists, sequence, query, token, head, sinks, out, lse, part_out, part_lse,
            num_heads, value_dim, decode_queries, SPLIT, SINKS, LSE, BLOCK_V,
        )  # fmt: skip


@triton.jit
def merge_splits(
    part_out, part_lse, sinks, out, lse, seq_lens, cu_seqlens_q, num_splits, num_heads, value_dim, decode_queries,
    MAX_SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Join the parts of sequences with few queries. Program: (sequence, tile of the value of a head, query)."""
    sequence, query = tl.program_id(0), tl.program_id(2)
    tiles = tl.cdiv(value_dim, BLOCK_V)
    start = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - start
    if (query < num_queries) & (num_queries <= decode_queries):
        length = tl.load(seq_lens + sequence)
        used = num_splits
        if not WHOLE:
            used = tl.cdiv(length, split_tokens(length, MAX_SPLITS, MIN_TOKENS))
        head, s = tl.program_id(1) // tiles, tl.arange(0, SPLITS)
        part = ((sequence.to(tl.int64) * num_splits + s) * decode_queries + query) * num_heads + head
        lses = tl.load(part_lse + part, mask=s < used, other=float("-inf"))
        largest = tl.max(lses, axis=0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp(lses - base)
        total = tl.sum(weights, axis=0)
        some = tl.where(total == 0.0, 1.0, total)
        c = tl.program_id(1) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
        full = (s < used) & (lses != float("-inf"))
        parts = tl.load(
            part_out + part[:, None] * value_dim + c[None, :], mask=full[:, None] & (c < value_dim)[None, :], other=0.0
        )
        result = tl.sum(parts * (weights / some)[:, None], axis=0)
        merged = tl.where(total == 0.0, float("-inf"), largest + tl.log(some))
        if SINKS:
            keep = 1.0 / (1.0 + tl.exp(tl.load(sinks + head).to(tl.float32) - merged))
            result = result * tl.where(merged == float("-inf"), 0.0, keep)
        at = (start + query).to(tl.int64) * num_heads + head
        tl.store(out + at * value_dim + c, cast(result, out.dtype.element_ty), mask=c < value_dim)
        if LSE:
            tl.store(lse + at, merged, mask=tl.program_id(1) % tiles == 0)
