"""Bounds of the logits of pages of tokens, from the smallest and the largest number of each channel of their keys."""

import triton
import triton.language as tl

from .pages import find_pages, query_of


@triton.jit
def middle_end(own, num_recent, page_size):
    """Where the last num_recent tokens of a query at position `own` begin: at a page, int64."""
    return tl.maximum(own + 1 - num_recent, 0).to(tl.int64) // page_size * page_size


@triton.jit
def larger(a, b):
    """The larger of two; NaN where one is."""
    return tl.where((b > a) | (b != b), b, a)


@triton.jit
def largest_of_heads(logits, exists):
    """The largest [N] of logits [HEADS, N] over the heads that exist; NaN where one of those is."""
    largest = tl.max(tl.where(exists[:, None], logits, float("-inf")), axis=0)
    spoiled = tl.sum((exists[:, None] & (logits != logits)).to(tl.int32), axis=0)  # of NaN tl.max says nothing
    return tl.where(spoiled > 0, float("nan"), largest)


@triton.jit(do_not_specialize=["group"])
def page_logits(
    q, q_t, q_h, q_d, low, low_b, low_s, low_h, low_d, high, high_b, high_s, high_h, high_d,
    block_table, table_b, table_column, seq_lens, cu_seqlens_q, out, num_seqs, group, dim, block_size, columns, tiles,
    page_size, num_sinks, num_recent,
    DOT: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, Hk, columns], dense: of each page the largest over the query heads of a kv head of the sum of
    max(q * low, q * high), -inf where a page is not scored. Program: (tile of the pages of a token, kv head)."""
    token, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    sequence, own = query_of(token, seq_lens, cu_seqlens_q, num_seqs)
    end = middle_end(own, num_recent, page_size)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first = n.to(tl.int64) * page_size  # token of each page
    scored = (n < columns) & (first < end) & (first + page_size > num_sinks)
    table = block_table + sequence.to(tl.int64) * table_b
    block, offset, found = find_pages(table, table_column, n, scored, block_size)
    row, kv_head = token.to(tl.int64), tl.program_id(1).to(tl.int64)
    largest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    if (tile * BLOCK_N).to(tl.int64) * page_size < end:
        d = tl.arange(0, BLOCK_D)
        inside = found[:, None] & (d < dim)[None, :]
        low_at = low + (block * low_b + offset * low_s + kv_head * low_h)[:, None] + (d * low_d)[None, :]
        high_at = high + (block * high_b + offset * high_s + kv_head * high_h)[:, None] + (d * high_d)[None, :]
        least = tl.load(low_at, mask=inside, other=0.0).to(DOT)
        most = tl.load(high_at, mask=inside, other=0.0).to(DOT)
        for first_head in range(0, group, HEADS):
            head = first_head + tl.arange(0, HEADS)
            there = head < group
            q_at = q + row * q_t + (kv_head * group + head)[:, None] * q_h + (d * q_d)[None, :]
            numbers = tl.load(q_at, mask=there[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)
            above, below = tl.where(numbers < 0.0, 0.0, numbers), tl.where(numbers > 0.0, 0.0, numbers)  # NaN in both
            bounds = tl.dot(above.to(DOT), tl.trans(most), input_precision="ieee")
            bounds = tl.dot(below.to(DOT), tl.trans(least), bounds, input_precision="ieee")
            largest = larger(largest, largest_of_heads(bounds, there))
    at = out + (row * tl.num_programs(1) + kv_head) * columns + n
    tl.store(at, tl.where(found, largest, float("-inf")), mask=n < columns)
