"""Groups of neighbouring tokens become one row each, and what is open is kept.

compress_rows reads what earlier calls kept before keep_tokens, a launch of its own, overwrites it.
"""

import triton
import triton.language as tl

from .apply_rope import turn_pairs
from .codecs import cast
from .pages import sequence_of


@triton.jit
def entry_of(place, seq_lens, cu_seqlens, num_seqs, RATIO: tl.constexpr, BLOCK_B: tl.constexpr):
    """The sequence and entry that come out at a place of the packed result; sequence -1 where none does."""
    before, sequence, entry = 0, -1, 0
    for start in range(0, num_seqs, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        there = b < num_seqs
        end = tl.load(seq_lens + b, mask=there, other=0)
        new = tl.load(cu_seqlens + b + 1, mask=there, other=0) - tl.load(cu_seqlens + b, mask=there, other=0)
        first = tl.maximum(end - new, 0) // RATIO
        count = end // RATIO - first
        upto = before + tl.cumsum(count, axis=0)
        mine = (place < upto) & (place >= upto - count)
        sequence += tl.sum(tl.where(mine, b + 1, 0), axis=0)
        entry += tl.sum(tl.where(mine, first + place - (upto - count), 0), axis=0)
        before += tl.sum(count, axis=0)
    return sequence, entry


@triton.jit
def compress_rows(
    kv, kv_t, kv_d, gate, gate_t, gate_d, bias, bias_r, bias_d, state, state_n, state_s, state_d, ring, state_slots,
    slots_stride, norm_weight, norm_d, seq_lens, cu_seqlens, cos_sin, cos_p, cos_d, block_table, table_b, table_column,
    max_blocks, block_size, rows, positions, slots, num_seqs, dim, eps, half,
    RATIO: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr,
    TURNS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """rows [R, dim], positions [R] and slots [R], dense, as the op returns them. Program: one of R places.

    STAGES   groups that an entry pools, its own last: stage s has columns s * dim to (s + 1) * dim - 1
    """
    place = tl.program_id(0)
    sequence, entry = entry_of(place, seq_lens, cu_seqlens, num_seqs, RATIO, BLOCK_B)
    d = tl.arange(0, BLOCK_D)
    row = tl.zeros((BLOCK_D,), tl.float32)
    position, target = tl.full((), -1, tl.int64), tl.full((), -1, tl.int64)
    if sequence >= 0:
        start = tl.load(cu_seqlens + sequence)
        begin = tl.load(seq_lens + sequence) - (tl.load(cu_seqlens + sequence + 1) - start)  # position of its token
        largest = tl.full((BLOCK_D,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_D,), tl.float32)
        for stage in range(STAGES):
            column = stage * dim + d
            for first in range(0, RATIO, BLOCK_P):
                m = first + tl.arange(0, BLOCK_P)
                p = (entry - (STAGES - 1 - stage)) * RATIO + m
                exists = (m < RATIO) & (p >= 0)
                here = exists & (p >= begin)
                token = (start + p - begin).to(tl.int64)
                inside = here[:, None] & (d < dim)[None, :]
                values = tl.load(kv + (token * kv_t)[:, None] + (column * kv_d)[None, :], mask=inside, other=0.0)
                values = values.to(tl.float32)
                gates = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
                if GATED:
                    gate_at = gate + (token * gate_t)[:, None] + (column * gate_d)[None, :]
                    gates = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
                if BIAS:
                    bias_at = bias + (m * bias_r)[:, None] + (column * bias_d)[None, :]
                    gates += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
                if STATE:
                    slot = tl.load(state_slots + sequence.to(tl.int64) * slots_stride).to(tl.int64)
                    kept = exists & (p < begin) & (slot >= 0)
                    kept_at = state + slot * state_n + ((p % ring).to(tl.int64) * state_s)[:, None]
                    earlier = kept[:, None] & (d < dim)[None, :]
                    values += tl.load(kept_at + (column * state_d)[None, :], mask=earlier, other=0.0)
                    gates += tl.load(kept_at + ((STAGES * dim + column) * state_d)[None, :], mask=earlier, other=0.0)
                    here = here | kept
                gates = tl.where(here[:, None], gates, float("-inf"))
                new = tl.maximum(largest, tl.max(gates, axis=0))
                weights, before = tl.exp(gates - new[None, :]), tl.exp(largest - new)
                total = total * before + tl.sum(weights, axis=0)
                row = row * before + tl.sum(weights * values, axis=0)
                largest = new
        row = tl.where(d < dim, row / total, 0.0)
        weight = tl.load(norm_weight + d * norm_d, mask=d < dim, other=0.0).to(tl.float32)
        row = row * tl.rsqrt(tl.sum(row * row, axis=0) / dim + eps) * weight
        position = (entry * RATIO).to(tl.int64)
        if TURNS:
            turned = turn_pairs(
                tl.reshape(row, (1, BLOCK_D)), position, cos_sin, cos_p, cos_d, dim - 2 * half, half, False, 1, BLOCK_D
            )
            row = tl.reshape(turned, (BLOCK_D,))
        if SLOTS:
            index = entry // block_size
            at = block_table + sequence.to(tl.int64) * table_b + index.to(tl.int64) * table_column
            block = tl.load(at, mask=index < max_blocks, other=-1).to(tl.int64)
            target = tl.where(block >= 0, block * block_size + entry % block_size, -1)
    out = rows + place.to(tl.int64) * dim + d
    tl.store(out, cast(row, rows.dtype.element_ty), mask=d < dim)
    tl.store(positions + place, position)
    if SLOTS:
        tl.store(slots + place, target)


@triton.jit
def keep_tokens(
    kv, kv_t, kv_d, gate, gate_t, gate_d, bias, bias_r, bias_d, state, state_n, state_s, state_d, ring, state_slots,
    slots_stride, seq_lens, cu_seqlens, num_seqs, width,
    RATIO: tl.constexpr, BIAS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The last tokens of each sequence, as many as a ring holds, into its state. Program: (token, tile of width)."""
    token = tl.program_id(0)
    sequence = sequence_of(token, cu_seqlens, num_seqs, 1, 0)
    end = tl.load(seq_lens + sequence)
    position = end - (tl.load(cu_seqlens + sequence + 1) - token)
    slot = tl.load(state_slots + sequence.to(tl.int64) * slots_stride).to(tl.int64)
    stays = (token < tl.load(cu_seqlens + num_seqs)) & (position >= 0) & (position >= end - ring) & (slot >= 0)
    if stays:
        c = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
        inside, row = c < width, token.to(tl.int64)
        values = tl.load(kv + row * kv_t + c * kv_d, mask=inside, other=0.0).to(tl.float32)
        gates = tl.load(gate + row * gate_t + c * gate_d, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            gates += tl.load(bias + (position % RATIO) * bias_r + c * bias_d, mask=inside, other=0.0).to(tl.float32)
        at = state + slot * state_n + (position % ring).to(tl.int64) * state_s
        tl.store(at + c * state_d, values, mask=inside)
        tl.store(at + (width + c) * state_d, gates, mask=inside)
