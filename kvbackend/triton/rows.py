"""Rows into slots of pages and out of them, as they are or encoded.

A tile is ROWS rows (of one token and head each) times BLOCK_D channels; row r is head r % num_heads of token
r // num_heads.
"""

import triton
import triton.language as tl

from .codecs import cast, encode, make_scale, scale_value
from .pages import load_rows, sequence_of


@triton.jit
def slots_of(token, exists, slots, slot_stride, HAS_SLOTS: tl.constexpr):
    """The slot of each token, int64, and whether it has one; without slots, a token's slot is its index."""
    if HAS_SLOTS:
        slot = tl.load(slots + token * slot_stride, mask=exists, other=-1).to(tl.int64)
        return slot, slot >= 0
    return token, exists


@triton.jit
def write_rows(
    rows, row_t, row_h, row_d, slots, slot_stride, cache, cache_b, cache_s, cache_h, cache_d, block_size, num_rows,
    num_heads, dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """cache[slot] = row, bit for bit; both are integers of their size. Program: a tile of rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (r // num_heads).to(tl.int64), (r % num_heads).to(tl.int64)
    slot, used = slots_of(token, r < num_rows, slots, slot_stride, True)
    source = rows + token * row_t + head * row_h
    target = cache + (slot // block_size) * cache_b + (slot % block_size) * cache_s + head * cache_h
    d = tl.arange(0, BLOCK_D)
    inside = used[:, None] & (d < dim)[None, :]
    number = tl.load(source[:, None] + (d * row_d)[None, :], mask=inside)
    tl.store(target[:, None] + (d * cache_d)[None, :], number, mask=inside)


@triton.jit
def amax_of_rows(
    rows, row_t, row_h, row_d, amax, amax_h, amax_d, num_tokens, dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each channel or head, as bits of a float32, whose order is theirs: the order of programs
    does not matter. Program: (tile of tokens, head)."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, d = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    inside = (token < num_tokens)[:, None] & (d < dim)[None, :]
    x = tl.load(rows + (token * row_t + head * row_h)[:, None] + (d * row_d)[None, :], mask=inside, other=0.0)
    largest = tl.max(magnitude(without_nan(x.to(tl.float32))).to(tl.int32, bitcast=True), axis=0)
    if PER_CHANNEL:
        tl.atomic_max(amax + head * amax_h + d * amax_d, largest, mask=d < dim)
    else:
        tl.atomic_max(amax + head * amax_h, tl.max(largest, axis=0))


@triton.jit
def without_nan(x):
    return tl.where(x != x, 0.0, x)


@triton.jit
def magnitude(x):
    """|x| as scales see it: infinity counts as 65504."""
    x = tl.abs(x)
    return tl.where(x == float("inf"), 65504.0, x)


@triton.jit
def write_encoded_rows(
    rows, row_t, row_h, row_d, slots, slot_stride, codes, code_b, code_s, code_h, code_d,
    scales, scale_b, scale_s, scale_h, scale_d, scale_part, global_scale, block_size, num_groups, num_heads, groups,
    dim,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, GLOBAL: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, RULE: tl.constexpr, GIVEN: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """Encode rows into the slots of codes and scales. Program: GROUPS of all num_groups groups of GROUP channels.

    groups  of a row; GROUP is the row, padded, where it has one
    GIVEN   "": a scale for each group is made by RULE and stored; "row" and "channel": scales are read, one for the row
            or one for each channel
    """
    index = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group = index // groups, index % groups
    token, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
    slot, used = slots_of(token, index < num_groups, slots, slot_stride, HAS_SLOTS)
    d = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = used[:, None] & (d < dim)
    x = tl.load(rows + (token * row_t + head * row_h)[:, None] + d * row_d, mask=inside, other=0.0).to(tl.float32)
    x = without_nan(x)
    block, offset = slot // block_size, slot % block_size
    scale_at = scales + block * scale_b + offset * scale_s + head * scale_h
    if GIVEN == "row":
        y = tl.div_rn(x, scale_value(tl.load(scale_at, mask=used, other=1), SCALE)[:, None])
    elif GIVEN == "channel":
        y = tl.div_rn(x, scale_value(tl.load(scale_at[:, None] + d * scale_d, mask=inside, other=1), SCALE))
    elif CODE == "int4":  # KIVI's values: a minimum beside the scale
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        low, step = tl.min(x, axis=1) + 0.0, tl.div_rn(tl.max(x, axis=1) - tl.min(x, axis=1), 15.0)
        low, step = low.to(tl.float16).to(tl.float32), step.to(tl.float16).to(tl.float32)
        step = tl.where(step == 0.0, 1.0, step)
        tl.store(scale_at + group * scale_d, step.to(tl.float16), mask=used)
        tl.store(scale_at + group * scale_d + scale_part, low.to(tl.float16), mask=used)
        y = tl.div_rn(x - low[:, None], step[:, None])
    else:
        amax = tl.max(magnitude(x), axis=1)
        if GLOBAL:
            number = tl.load(global_scale)
            x, amax = tl.div_rn(x, number), tl.div_rn(amax, number)
        scale = make_scale(amax, LARGEST, EMAX, FLOOR, RULE)
        tl.store(scale_at + group * scale_d, scale.to(scales.dtype.element_ty), mask=used)
        y = tl.div_rn(x, scale_value(scale, SCALE)[:, None])
    code = encode(y, CODE)
    target = (codes + block * code_b + offset * code_s + head * code_h)[:, None]
    if CODE == "e2m1" or CODE == "int4":
        low_code, high_code = tl.split(tl.reshape(code, (GROUPS, GROUP // 2, 2)))
        half = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(
            target + half * code_d, (low_code | (high_code << 4)).to(tl.uint8), mask=used[:, None] & (2 * half < dim)
        )
    else:
        tl.store(target + d * code_d, code.to(tl.uint8), mask=inside)


@triton.jit
def gather_slots(
    table, table_b, table_column, cu_seqlens, seq_starts, slots, num_seqs, num_tokens, max_blocks, block_size,
    HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """The slot of each row of a ragged output, -1 where there is none. Program: one row."""
    row = tl.program_id(0)
    sequence = sequence_of(row, cu_seqlens, num_seqs, 1, 0)
    position = row - tl.load(cu_seqlens + sequence)
    if HAS_STARTS:
        position += tl.load(seq_starts + sequence)
    column = position // block_size
    inside = (row < tl.load(cu_seqlens + num_seqs)) & (position >= 0) & (column < max_blocks)
    at = table + sequence.to(tl.int64) * table_b + column.to(tl.int64) * table_column
    block = tl.load(at, mask=inside, other=-1).to(tl.int64)
    tl.store(slots + row, tl.where(block >= 0, block * block_size + position % block_size, -1))


@triton.jit
def read_rows(
    codes, code_b, code_s, code_h, code_d, scales, scale_b, scale_s, scale_h, scale_d, scale_part, scale_tokens,
    global_scale, slots, slot_stride, out, block_size, num_rows, num_heads, dim,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, CAST: tl.constexpr,
    HAS_SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [num_rows, dim], dense, = the rows of slots, decoded; zeros where the slot is -1. Program: a tile of rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (r // num_heads).to(tl.int64), (r % num_heads).to(tl.int64)
    slot, used = slots_of(token, r < num_rows, slots, slot_stride, HAS_SLOTS)
    slot = tl.where(used, slot, 0)
    block, offset = slot // block_size, slot % block_size
    at = block * code_b + offset * code_s + head * code_h
    scale_at = block * scale_b + (offset // scale_tokens) * scale_s + head * scale_h
    x = load_rows(
        codes, at, used, code_d, scales, scale_at, scale_d, scale_part, global_scale, dim,
        BLOCK_D, CODE, SCALE, GROUP, GLOBAL,
    )  # fmt: skip
    if CAST:
        x = cast(x.to(tl.float32), out.dtype.element_ty)
    d = tl.arange(0, BLOCK_D)
    inside = (r < num_rows)[:, None] & (d < dim)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * dim + d[None, :], x, mask=inside)
