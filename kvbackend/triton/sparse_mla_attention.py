"""Absorbed MLA over chosen tokens of a paged latent cache, plain, quantized or in records.

The queries of a sequence have choices of their own, so a tile is heads of one query. As in attention.py, sequences of
few queries are split, here over their choices, and joined by merge_splits.
"""

import triton
import triton.language as tl

from .attention import online_softmax, store_result
from .pages import find_pages, load_rows, sequence_of


@triton.jit
def sparse_mla_attention(
    q, q_t, q_h, q_d, q_pe, q_pe_t, q_pe_h, q_pe_d,
    k, k_b, k_s, k_h, k_d, scales, scale_b, scale_s, scale_h, scale_d, scale_part, scale_tokens, number,
    k_pe, k_pe_b, k_pe_s, k_pe_d,
    block_table, table_b, table_column, max_blocks, seq_lens, cu_seqlens_q, indices, index_t, index_k, topk,
    out, lse, part_out, part_lse, num_seqs, num_heads, dim, pe_dim, block_size, softmax_scale, decode_queries,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr,
    SPLIT: tl.constexpr, SPLIT_TOKENS: tl.constexpr, CAUSAL: tl.constexpr, LSE: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PE: tl.constexpr,
):  # fmt: skip
    """Program: (query of a short sequence or token, tile of heads, split). Outputs as in attention.store_result."""
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
        last = own
        if not CAUSAL:
            last = tl.where(own >= 0, length - 1, -1)
        head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        head_exists = head < num_heads
        token = (start + query).to(tl.int64)
        d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_PE)
        q_at = q + token * q_t + head[:, None] * q_h + (d * q_d)[None, :]
        rows = tl.load(q_at, mask=head_exists[:, None] & (d < dim)[None, :], other=0.0).to(DOT)
        pe_at = q_pe + token * q_pe_t + head[:, None] * q_pe_h + (e * q_pe_d)[None, :]
        pe_rows = tl.load(pe_at, mask=head_exists[:, None] & (e < pe_dim)[None, :], other=0.0).to(DOT)
        table = block_table + sequence.to(tl.int64) * table_b
        low, high = 0, topk
        if SPLIT:
            low = tl.program_id(2) * SPLIT_TOKENS
            high = tl.minimum(topk, low + SPLIT_TOKENS)
        largest = tl.full((BLOCK_M,), -1e30, tl.float32)
        total, sums = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for first in range(low, high, BLOCK_N):
            i = first + tl.arange(0, BLOCK_N)
            j = tl.load(indices + token * index_t + i * index_k, mask=i < high, other=-1)
            chosen = (j >= 0) & (j <= last) & (j // block_size < max_blocks)
            block, offset, found = find_pages(table, table_column, j, chosen, block_size)
            keys = load_rows(
                k, block * k_b + offset * k_s, found, k_d, scales,
                block * scale_b + (offset // scale_tokens) * scale_s, scale_d, scale_part, number, dim,
                BLOCK_D, CODE, SCALE, GROUP, GLOBAL,
            ).to(DOT)  # fmt: skip
            rotary_at = k_pe + (block * k_pe_b + offset * k_pe_s)[:, None] + (e * k_pe_d)[None, :]
            rotary = tl.load(rotary_at, mask=found[:, None] & (e < pe_dim)[None, :], other=0.0).to(DOT)
            logits = tl.dot(rows, tl.trans(keys), input_precision="ieee")
            logits = tl.dot(pe_rows, tl.trans(rotary), logits, input_precision="ieee") * softmax_scale
            logits = tl.where(found[None, :], logits, float("-inf"))
            largest, total, sums = online_softmax(logits, keys, largest, total, sums, DOT)
        store_result(
            largest, total, sums, head_exists, sequence, query, token, head, lse, out, lse, part_out, part_lse,
            num_heads, dim, decode_queries, SPLIT, False, LSE, BLOCK_D,
        )  # fmt: skip
