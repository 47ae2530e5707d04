"""Logits of the tokens in chosen pages."""

import triton
import triton.language as tl

from .page_logits import larger, largest_of_heads, middle_end
from .pages import find_pages, load_rows, query_of


@triton.jit(do_not_specialize=["group"])
def token_logits(
    q, q_t, q_h, q_d, k, k_b, k_s, k_h, k_d, scales, scale_b, scale_s, scale_h, scale_d, scale_part, scale_tokens,
    number, block_table, table_b, table_column, seq_lens, cu_seqlens_q, pages, page_t, page_h, page_n, out,
    num_seqs, group, dim, block_size, columns, tiles, page_size, num_sinks, num_recent,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr,
    DOT: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, Hk, columns], dense: of each token the largest logit, not scaled, of the query heads of a kv head; -inf
    where it is not scored. Program: (tile of the columns of a token, kv head)."""
    token, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    sequence, own = query_of(token, seq_lens, cu_seqlens_q, num_seqs)
    end = middle_end(own, num_recent, page_size)
    row, kv_head = token.to(tl.int64), tl.program_id(1).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    page_at = pages + row * page_t + kv_head * page_h + (n // page_size).to(tl.int64) * page_n
    page = tl.load(page_at, mask=n < columns, other=-1)
    j = (page * page_size + n % page_size).to(tl.int32)
    scored = (page >= 0) & (page < end // page_size) & (j >= num_sinks)  # the middle ends with a page
    table = block_table + sequence.to(tl.int64) * table_b
    block, offset, found = find_pages(table, table_column, j, scored, block_size)
    largest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    keys = load_rows(
        k, block * k_b + offset * k_s + kv_head * k_h, found, k_d, scales,
        block * scale_b + (offset // scale_tokens) * scale_s + kv_head * scale_h, scale_d, scale_part, number, dim,
        BLOCK_D, CODE, SCALE, GROUP, GLOBAL,
    ).to(DOT)  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    for first_head in range(0, group, HEADS):
        head = first_head + tl.arange(0, HEADS)
        there = head < group
        q_at = q + row * q_t + (kv_head * group + head)[:, None] * q_h + (d * q_d)[None, :]
        queries = tl.load(q_at, mask=there[:, None] & (d < dim)[None, :], other=0.0).to(DOT)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        largest = larger(largest, largest_of_heads(logits, there))
    at = out + (row * tl.num_programs(1) + kv_head) * columns + n
    tl.store(at, tl.where(found, largest, float("-inf")), mask=n < columns)
