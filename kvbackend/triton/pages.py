"""Where rows lie in pages, and how they are loaded and decoded."""

import triton
import triton.language as tl

from .codecs import decode, scale_value


@triton.jit
def sequence_of(index, starts, count, BLOCK: tl.constexpr, SEQUENCE: tl.constexpr):
    """The last sequence b with starts[b] // BLOCK + b * SEQUENCE <= index, by bisection; 0 where there is none.

    With BLOCK 1 and SEQUENCE 0 that is the sequence of a row; with SEQUENCE 1, of a tile of BLOCK rows, where each
    sequence has tiles of its own and at most one of them is empty.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        start = tl.load(starts + middle) // BLOCK + middle * SEQUENCE
        if start <= index:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low - 1, 0)


@triton.jit
def query_of(token, seq_lens, cu_seqlens_q, num_seqs):
    """The sequence of a row of q, and its index within it; -1 where it has none."""
    sequence = sequence_of(token, cu_seqlens_q, num_seqs, 1, 0)
    own = tl.load(seq_lens + sequence) - (tl.load(cu_seqlens_q + sequence + 1) - token)
    return sequence, tl.where(token < tl.load(cu_seqlens_q + num_seqs), tl.maximum(own, -1), -1)


@triton.jit
def find_pages(table, table_column, position, inside, block_size):
    """Block [N] int64 and row in it [N] of positions [N], and which are in a block; `table` is the sequence's row."""
    column = tl.where(inside, position // block_size, 0)
    block = tl.load(table + column.to(tl.int64) * table_column, mask=inside, other=-1).to(tl.int64)
    found = inside & (block >= 0)
    return tl.where(found, block, 0), position % block_size, found


@triton.jit
def load_rows(
    codes, at, exists, code_d, scales, scale_at, scale_d, scale_part, global_scale, dim,
    BLOCK_D: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr,
):  # fmt: skip
    """Rows [N, BLOCK_D], zeros where they do not exist: as they are where CODE is "", else decoded to float32.

    at         [N] int64 where each row starts; scale_at where its scales do
    GROUP      channels that share a scale; 0: the row has one
    GLOBAL     whether there is a global scale besides
    """
    d = tl.arange(0, BLOCK_D)
    seen = exists[:, None] & (d < dim)[None, :]
    if CODE == "":
        value = tl.load(codes + at[:, None] + (d * code_d)[None, :], mask=seen, other=0)
    else:
        if CODE == "e2m1" or CODE == "int4":
            half = tl.arange(0, BLOCK_D // 2)
            there = exists[:, None] & (2 * half < dim)[None, :]
            byte = tl.load(codes + at[:, None] + (half * code_d)[None, :], mask=there, other=0).to(tl.int32)
            code = tl.interleave(byte & 15, byte >> 4)
        else:
            code = tl.load(codes + at[:, None] + (d * code_d)[None, :], mask=seen, other=0).to(tl.int32)
        value = decode(code, CODE)
        if GROUP == 0:
            value = value * scale_value(tl.load(scales + scale_at, mask=exists, other=0), SCALE)[:, None]
        else:  # [N, channels with scales of their own, GROUP]
            g = tl.arange(0, BLOCK_D // GROUP)
            scaled = exists[:, None] & (g * GROUP < dim)[None, :]
            scale_of = scales + scale_at[:, None] + (g * scale_d)[None, :]
            grouped = tl.reshape(value, (value.shape[0], BLOCK_D // GROUP, GROUP))
            grouped = grouped * scale_value(tl.load(scale_of, mask=scaled, other=0), SCALE)[:, :, None]
            if CODE == "int4":
                grouped += tl.load(scale_of + scale_part, mask=scaled, other=0).to(tl.float32)[:, :, None]
            value = tl.reshape(grouped, (value.shape[0], BLOCK_D))
        if GLOBAL:
            value = value * tl.load(global_scale)
    return value
