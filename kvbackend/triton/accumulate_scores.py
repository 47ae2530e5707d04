"""The attention that queries pay to each key, added up: first each query's denominator, then each key's sum.

A denominator is two numbers, its largest logit and the sum of exp(logit - largest): their one logarithm would lose the
digits that large logits take. A key's sum is made by one program, in the order of the queries, so no atomic additions
are needed. As in attention.py, the keys of sequences with few counted queries are split, and join_parts joins the
denominators of the parts.
"""

import triton
import triton.language as tl

from .attention import capped, split_tokens
from .pages import find_pages, load_rows


@triton.jit
def load_queries(
    q, q_t, q_h, q_d, start, num_queries, length, first_query, kv_head, first_head, group, dim, table, table_column,
    block_size, positions, position_b, position_s, POSITIONS: tl.constexpr, DOT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of rows [BLOCK_M, BLOCK_D]: HEADS heads of a kv head for neighbouring queries; whether each sees anything,
    its query and head, and its position."""
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    m = tl.arange(0, BLOCK_M)
    query = first_query + m // HEADS
    in_group = first_head + m % HEADS
    exists = (query < num_queries) & (m < QUERIES * HEADS) & (in_group < group)
    head = kv_head * group + in_group
    position = length - num_queries + query
    sees = exists & (position >= 0)
    if POSITIONS:
        block, offset, found = find_pages(table, table_column, position, sees, block_size)
        own = tl.load(positions + block * position_b + offset * position_s, mask=found, other=0)
        position = own.to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    at = q + ((start + query).to(tl.int64) * q_t + head * q_h)[:, None] + (d * q_d)[None, :]
    rows = tl.load(at, mask=exists[:, None] & (d < dim)[None, :], other=0.0).to(DOT)
    return rows, sees, query, head, position


@triton.jit
def load_keys(
    k, k_b, k_s, k_h, k_d, k_scales, k_scale_b, k_scale_s, k_scale_h, k_scale_d, k_scale_part, k_scale_tokens, k_number,
    j, inside, kv_head, dim, table, table_column, block_size, positions, position_b, position_s, bias, bias_b, bias_s,
    bias_h,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, POSITIONS: tl.constexpr,
    BIAS: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys [BLOCK_N, BLOCK_D] of columns j, where they lie, which are there, and the position and bias of each."""
    block, offset, found = find_pages(table, table_column, j, inside, block_size)
    keys = load_rows(
        k, block * k_b + offset * k_s + kv_head * k_h, found, k_d, k_scales,
        block * k_scale_b + (offset // k_scale_tokens) * k_scale_s + kv_head * k_scale_h, k_scale_d, k_scale_part,
        k_number, dim, BLOCK_D, CODE, SCALE, GROUP, GLOBAL,
    ).to(DOT)  # fmt: skip
    position = j
    if POSITIONS:
        position = tl.load(positions + block * position_b + offset * position_s, mask=found, other=0).to(tl.int32)
    added = tl.zeros((BLOCK_N,), tl.float32)
    if BIAS:
        added = tl.load(bias + block * bias_b + offset * bias_s + kv_head * bias_h, mask=found, other=0.0)
    return keys, block, offset, found, position, added


@triton.jit
def logits_of(
    rows, sees, position, keys, found, key_position, added, softmax_scale, softcap, window, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Logits [M, N] of attention, -inf where a query does not see a key."""
    logits = tl.dot(rows, tl.trans(keys), input_precision="ieee") * softmax_scale
    if SOFTCAP:
        logits = capped(logits, softcap)
    logits = logits + added[None, :]
    seen = found[None, :] & sees[:, None] & (key_position[None, :] <= position[:, None])
    logits = tl.where(seen, logits, float("-inf"))
    if WINDOW:  # joined with `seen`, this keeps bishengir-compile-a5 busy forever
        logits = tl.where(position[:, None] - key_position[None, :] < window, logits, float("-inf"))
    return logits


@triton.jit
def store_denominator(at, exists, largest, total, sinks, head, num_heads, SINKS: tl.constexpr):
    """The largest logits of heads at `at` and the sums behind those of all heads, with the sinks."""
    if SINKS:
        sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
        new = tl.maximum(largest, sink)
        total = total * tl.exp(largest - new) + tl.exp(sink - new)
        largest = new
    tl.store(at, largest, mask=exists)
    tl.store(at + num_heads, total, mask=exists)


@triton.jit
def find_denominators(
    q, q_t, q_h, q_d,
    k, k_b, k_s, k_h, k_d, k_scales, k_scale_b, k_scale_s, k_scale_h, k_scale_d, k_scale_part, k_scale_tokens, k_number,
    block_table, table_b, table_column, seq_lens, cu_seqlens_q, positions, position_b, position_s,
    bias, bias_b, bias_s, bias_h, denominators, num_heads, group, dim, block_size, softmax_scale, softcap, window,
    last_queries, tiles, parts, sinks, decode_queries,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    POSITIONS: tl.constexpr, BIAS: tl.constexpr, SINKS: tl.constexpr, DOT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program: (tile of the counted queries of a sequence, tile of heads, split).

    denominators   [T, 2, H], with the sinks; written where not SPLIT
    parts          [sequence, split, counted query, 2, H], without; written where SPLIT
    """
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    sequence = tl.program_id(0) // tiles
    start = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    counted = tl.minimum(num_queries, last_queries)
    first_query = num_queries - counted + tl.program_id(0) % tiles * QUERIES
    mine = (first_query < num_queries) & ((counted <= decode_queries) == SPLIT)
    size = split_tokens(length, MAX_SPLITS, MIN_TOKENS)
    if SPLIT:
        mine = mine & (tl.program_id(2) * size < length)
    if mine:
        head_tiles = tl.cdiv(group, HEADS)
        kv_head = (tl.program_id(1) // head_tiles).to(tl.int64)
        table = block_table + sequence.to(tl.int64) * table_b
        rows, sees, query, head, position = load_queries(
            q, q_t, q_h, q_d, start, num_queries, length, first_query, kv_head, tl.program_id(1) % head_tiles * HEADS,
            group, dim, table, table_column, block_size, positions, position_b, position_s,
            POSITIONS, DOT, HEADS, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        low, high = 0, length
        if not POSITIONS:
            high = tl.minimum(length, length - num_queries + first_query + QUERIES)
        if WINDOW and not POSITIONS:
            low = tl.maximum(length - num_queries + first_query - window + 1, 0) // BLOCK_N * BLOCK_N
        if SPLIT:
            low = tl.maximum(low, tl.program_id(2) * size)
            high = tl.minimum(high, (tl.program_id(2) + 1) * size)
        largest = tl.full((BLOCK_M,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(low, high, BLOCK_N):
            j = first + tl.arange(0, BLOCK_N)
            keys, _, _, found, key_position, added = load_keys(
                k, k_b, k_s, k_h, k_d, k_scales, k_scale_b, k_scale_s, k_scale_h, k_scale_d, k_scale_part,
                k_scale_tokens, k_number, j, j < high, kv_head, dim, table, table_column, block_size, positions,
                position_b, position_s, bias, bias_b, bias_s, bias_h,
                CODE, SCALE, GROUP, GLOBAL, POSITIONS, BIAS, DOT, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            logits = logits_of(
                rows, sees, position, keys, found, key_position, added, softmax_scale, softcap, window, SOFTCAP, WINDOW
            )
            new = tl.maximum(largest, tl.max(logits, axis=1))
            total = total * tl.exp(largest - new) + tl.sum(tl.exp(logits - new[:, None]), axis=1)
            largest = new
        if SPLIT:
            part = (sequence.to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * decode_queries
            part += query - (num_queries - counted)
            at = parts + 2 * part * num_heads + head
            store_denominator(at, sees, largest, total, sinks, head, num_heads, False)
        else:
            at = denominators + 2 * (start + query).to(tl.int64) * num_heads + head
            store_denominator(at, sees, largest, total, sinks, head, num_heads, SINKS)


@triton.jit
def join_parts(
    parts, denominators, sinks, seq_lens, cu_seqlens_q, num_heads, num_splits, last_queries, decode_queries,
    MAX_SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Denominators of what find_denominators split. Program: (sequence, counted query, tile of heads)."""
    sequence, i = tl.program_id(0), tl.program_id(1)
    end = tl.load(cu_seqlens_q + sequence + 1)
    counted = tl.minimum(end - tl.load(cu_seqlens_q + sequence), last_queries)
    if (i < counted) & (counted <= decode_queries):
        length = tl.load(seq_lens + sequence)
        used = tl.cdiv(length, split_tokens(length, MAX_SPLITS, MIN_TOKENS))
        s, head = tl.arange(0, SPLITS), tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
        part = (sequence.to(tl.int64) * num_splits + s) * decode_queries + i
        part_at = parts + (2 * part * num_heads)[:, None] + head[None, :]
        there = (s < used)[:, None] & (head < num_heads)[None, :]
        part_largest = tl.load(part_at, mask=there, other=-1e30)
        largest = tl.max(part_largest, axis=0)
        part_total = tl.load(part_at + num_heads, mask=there, other=0.0)
        total = tl.sum(part_total * tl.exp(part_largest - largest[None, :]), axis=0)
        at = denominators + 2 * (end - counted + i).to(tl.int64) * num_heads + head
        store_denominator(at, head < num_heads, largest, total, sinks, head, num_heads, SINKS)


@triton.jit
def add_mass(
    q, q_t, q_h, q_d,
    k, k_b, k_s, k_h, k_d, k_scales, k_scale_b, k_scale_s, k_scale_h, k_scale_d, k_scale_part, k_scale_tokens, k_number,
    block_table, table_b, table_column, seq_lens, cu_seqlens_q, positions, position_b, position_s,
    bias, bias_b, bias_s, bias_h, denominators, num_heads, group, dim, block_size, softmax_scale, softcap, window,
    last_queries, tiles, scores, score_b, score_s, score_h, num_columns,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, POSITIONS: tl.constexpr, BIAS: tl.constexpr, PAGED: tl.constexpr, DOT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """scores += attention, a mean over the group. Program: (tile of the keys of a sequence, kv head).

    scores   strides by sequence, column and head; PAGED: by block, row of it and head
    """
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    sequence = tl.program_id(0) // tiles
    first_key = tl.program_id(0) % tiles * BLOCK_N
    start = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    counted = tl.minimum(num_queries, last_queries)
    if (counted > 0) & (first_key < length):
        kv_head = tl.program_id(1).to(tl.int64)
        table = block_table + sequence.to(tl.int64) * table_b
        j = first_key + tl.arange(0, BLOCK_N)
        keys, block, offset, found, key_position, added = load_keys(
            k, k_b, k_s, k_h, k_d, k_scales, k_scale_b, k_scale_s, k_scale_h, k_scale_d, k_scale_part,
            k_scale_tokens, k_number, j, j < length, kv_head, dim, table, table_column, block_size, positions,
            position_b, position_s, bias, bias_b, bias_s, bias_h,
            CODE, SCALE, GROUP, GLOBAL, POSITIONS, BIAS, DOT, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        low, high = num_queries - counted, num_queries
        if not POSITIONS:  # queries before the first key do not see it
            low = tl.maximum(low, first_key - (length - num_queries))
        if WINDOW and not POSITIONS:
            high = tl.minimum(high, first_key + BLOCK_N + window - 1 - (length - num_queries))
        mass = tl.zeros((BLOCK_N,), tl.float32)
        for first_head in range(0, group, HEADS):
            for first_query in range(low, high, QUERIES):
                rows, sees, query, head, position = load_queries(
                    q, q_t, q_h, q_d, start, num_queries, length, first_query, kv_head, first_head, group, dim, table,
                    table_column, block_size, positions, position_b, position_s,
                    POSITIONS, DOT, HEADS, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                logits = logits_of(
                    rows, sees, position, keys, found, key_position, added, softmax_scale, softcap, window, SOFTCAP,
                    WINDOW,
                )  # fmt: skip
                at = denominators + 2 * (start + query).to(tl.int64) * num_heads + head
                largest = tl.load(at, mask=sees, other=0.0)
                total = tl.load(at + num_heads, mask=sees, other=1.0)
                weights = tl.exp(logits - largest[:, None]) * (1.0 / total)[:, None]
                weights = tl.where(logits == float("-inf"), 0.0, weights)
                mass += tl.sum(weights, axis=0)
        if PAGED:
            target = scores + block * score_b + offset * score_s + kv_head * score_h
        else:
            target = scores + sequence.to(tl.int64) * score_b + kv_head * score_h + j.to(tl.int64) * score_s
            found = found & (j < num_columns)
        tl.store(target, tl.load(target, mask=found, other=0.0) + mass / group, mask=found)
