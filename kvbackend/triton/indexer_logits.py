"""Scores of paged index keys."""

import triton
import triton.language as tl

from .pages import find_pages, load_rows, query_of


@triton.jit
def column_keys(column, exists, candidates, candidate_n, candidate_size, CANDIDATES: tl.constexpr):
    """The key of each column of a row, -1 where there is none; `candidates` is the row's."""
    if CANDIDATES:
        at = candidates + (column // candidate_size).to(tl.int64) * candidate_n
        block = tl.load(at, mask=exists, other=-1).to(tl.int32)
        return tl.where(block >= 0, block * candidate_size + column % candidate_size, -1)
    return tl.where(exists, column, -1)


@triton.jit(do_not_specialize=["num_heads"])  # as the constant 1 it ends bishengir-compile-a5 by an assertion
def indexer_logits(
    q, q_t, q_h, q_d, weights, weight_t, weight_h,
    k, k_b, k_s, k_h, k_d, scales, scale_b, scale_s, scale_h, scale_d, scale_part, scale_tokens, number,
    block_table, table_b, table_column, max_blocks, seq_lens, cu_seqlens_q, candidates, candidate_t, candidate_n,
    candidate_size, out, out_t, first_token, first_column, columns, num_seqs, num_heads, dim, block_size,
    compress_ratio,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, CANDIDATES: tl.constexpr,
    DOT: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [tokens from first_token on, columns from first_column on]: sum over heads of weight * relu(q . k), -inf
    where a key is not seen.

    A column is a key; with CANDIDATES, one of the candidate_size keys of the blocks that `candidates` [T, n] names,
    which -1 pads. Program: (token, tile of columns), all heads, HEADS at a time.
    """
    token = first_token + tl.program_id(0)
    sequence, own = query_of(token, seq_lens, cu_seqlens_q, num_seqs)
    visible = tl.minimum((own + 1) // compress_ratio, tl.load(seq_lens + sequence) // compress_ratio)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = column_keys(
        first_column + n, n < columns, candidates + token.to(tl.int64) * candidate_t, candidate_n, candidate_size,
        CANDIDATES,
    )  # fmt: skip
    inside = (j >= 0) & (j < visible) & (j // block_size < max_blocks)
    table = block_table + sequence.to(tl.int64) * table_b
    block, offset, found = find_pages(table, table_column, j, inside, block_size)
    total = tl.zeros((BLOCK_N,), tl.float32)
    if CANDIDATES or first_column + tl.program_id(1) * BLOCK_N < visible:
        keys = load_rows(
            k, block * k_b + offset * k_s, found, k_d, scales, block * scale_b + (offset // scale_tokens) * scale_s,
            scale_d, scale_part, number, dim, BLOCK_D, CODE, SCALE, GROUP, GLOBAL,
        ).to(DOT)  # fmt: skip
        d, row = tl.arange(0, BLOCK_D), token.to(tl.int64)
        for first in range(0, num_heads, HEADS):
            head = first + tl.arange(0, HEADS)
            there = head < num_heads
            q_at = q + row * q_t + head[:, None] * q_h + (d * q_d)[None, :]
            queries = tl.load(q_at, mask=there[:, None] & (d < dim)[None, :], other=0.0).to(DOT)
            weight = tl.load(weights + row * weight_t + head * weight_h, mask=there, other=0.0).to(tl.float32)
            score = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            score = tl.where(there[:, None] & ((score >= 0.0) | (score != score)), score, 0.0)  # 0 * inf is NaN, too
            total += tl.sum(score * weight[:, None], axis=0)
    at = out + tl.program_id(0).to(tl.int64) * out_t + n
    tl.store(at, tl.where(found, total, float("-inf")), mask=n < columns)
