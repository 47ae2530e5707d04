"""Scores of paged index keys."""

import triton
import triton.language as tl

from .pages import find_pages, load_rows, sequence_of


@triton.jit(do_not_specialize=["num_heads"])  # as the constant 1 it ends bishengir-compile-a5 by an assertion
def indexer_logits(
    q, q_t, q_h, q_d, weights, weight_t, weight_h,
    k, k_b, k_s, k_h, k_d, scales, scale_b, scale_s, scale_h, scale_d, scale_part, scale_tokens, number,
    block_table, table_b, table_column, seq_lens, cu_seqlens_q, out, first_token, num_seqs, num_heads, dim, width,
    block_size, compress_ratio,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, DOT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [tokens from first_token on, width]: sum over heads of weight * relu(q . k), -inf where a key is not seen.

    Program: (token, tile of keys), all heads, HEADS at a time.
    """
    token = first_token + tl.program_id(0)
    sequence = sequence_of(token, cu_seqlens_q, num_seqs, 1, 0)
    own = tl.load(seq_lens + sequence) - (tl.load(cu_seqlens_q + sequence + 1) - token)
    own = tl.where(token < tl.load(cu_seqlens_q + num_seqs), tl.maximum(own, -1), -1)
    visible = tl.minimum((own + 1) // compress_ratio, tl.load(seq_lens + sequence) // compress_ratio)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    table = block_table + sequence.to(tl.int64) * table_b
    block, offset, found = find_pages(table, table_column, j, (j < visible) & (j < width), block_size)
    total = tl.zeros((BLOCK_N,), tl.float32)
    if tl.program_id(1) * BLOCK_N < visible:
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
            score = tl.where(score < 0.0, 0.0, score)  # not maximum: NaN stays
            total += tl.sum(score * weight[:, None], axis=0)
    at = out + tl.program_id(0).to(tl.int64) * width + j
    tl.store(at, tl.where(found, total, float("-inf")), mask=j < width)
