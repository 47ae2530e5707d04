"""Stable top-k by radix: the k-th key, digit by digit, then everything above it and the first of its equals."""

import triton
import triton.language as tl


@triton.jit
def ordered(score, exists):
    """float32 scores as int32 keys of the same order, and which may be selected: NaN and -inf may not."""
    selectable = exists & (score == score) & (score != float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 and 0.0 are equal
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), selectable


@triton.jit
def kth_highest(scores, score_n, low, high, wanted, BLOCK: tl.constexpr):
    """Of the scores of columns low to high - 1 of a row: the key of the last of the `wanted` highest, and how many of
    that key are among them. Fewer than wanted: all of them."""
    digit = tl.arange(0, 256)
    prefix = 0  # the digits found so far, as unsigned; wanted: how many keys of that prefix are to be taken
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((256,), tl.int32)
        for first in range(low // BLOCK * BLOCK, high, BLOCK):  # aligned, for wide loads
            n = first + tl.arange(0, BLOCK)
            inside = (n >= low) & (n < high)
            score = tl.load(scores + n.to(tl.int64) * score_n, mask=inside, other=0.0).to(tl.float32)
            key, selectable = ordered(score, inside)
            key = key ^ -2147483648  # as unsigned: the sign bit counts most
            same = ((key >> shift) >> 8) == (prefix >> shift) >> 8
            if step == 0:
                same = n >= 0
            counted = selectable & same
            bins = tl.where(counted, (key >> shift) & 255, 0)
            uncounted = tl.sum(tl.where(counted, 0, 1), axis=0)
            counts += tl.histogram(bins, 256) - tl.where(digit == 0, uncounted, 0)
        total = tl.sum(counts, axis=0)
        if step == 0:
            wanted = tl.minimum(wanted, total)
        from_here = total - tl.cumsum(counts, axis=0) + counts  # keys whose digit is this one or higher
        chosen = tl.maximum(tl.max(tl.where(from_here >= wanted, digit, 0), axis=0), 0)
        wanted -= tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
        prefix = (chosen << shift) | prefix  # this way round for the interpreter of triton-ascend, where it is an int
    return prefix ^ -2147483648, wanted


@triton.jit
def taken_of(score, exists, threshold, wanted, ties):
    """Which of a tile's scores are taken, as 0 and 1, where `ties` of the threshold's key were before; and ties now."""
    key, selectable = ordered(score, exists)
    tie = (selectable & (key == threshold)).to(tl.int32)
    early = ties + tl.cumsum(tie, axis=0) <= wanted
    return (selectable & (key > threshold)).to(tl.int32) + tie * early.to(tl.int32), ties + tl.sum(tie, axis=0)


@triton.jit
def topk_by_position(
    scores, score_t, score_n, lengths, length_stride, out, num_columns, k, HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, k], -1 before, = positions of the k highest scores of each row, ascending. Program: one row."""
    row = tl.program_id(0).to(tl.int64)
    length = num_columns
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths + row * length_stride), num_columns)
    scores += row * score_t
    threshold, wanted = kth_highest(scores, score_n, 0, length, k, BLOCK)
    taken, ties = 0, 0
    for first in range(0, length, BLOCK):
        n = first + tl.arange(0, BLOCK)
        score = tl.load(scores + n.to(tl.int64) * score_n, mask=n < length, other=0.0).to(tl.float32)
        take, ties = taken_of(score, n < length, threshold, wanted, ties)
        place = taken + tl.cumsum(take, axis=0) - 1
        tl.store(out + row * k + place, n, mask=(take > 0) & (place < k))
        taken += tl.sum(take, axis=0)


@triton.jit
def order_by_score(
    scores, score_t, score_n, chosen, out, k, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """out [T, k], -1 before, = the positions `chosen` [T, k], ascending, by score, highest first. Program: (row, tile).

    The place of each is the number of those before it: higher scores, and equal ones at lower positions.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * score_t
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(chosen + row * k + i, mask=i < k, other=-1)
    exists = position >= 0
    score = tl.load(scores + tl.where(exists, position, 0).to(tl.int64) * score_n, mask=exists, other=0.0)
    score = score.to(tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, k, OTHERS):
        j = first + tl.arange(0, OTHERS)
        other = tl.load(chosen + row * k + j, mask=j < k, other=-1)
        there = other >= 0
        value = tl.load(scores + tl.where(there, other, 0).to(tl.int64) * score_n, mask=there, other=0.0)
        value = value.to(tl.float32)
        before = (value[None, :] > score[:, None]) | ((value[None, :] == score[:, None]) & (j[None, :] < i[:, None]))
        place += tl.sum((before & there[None, :]).to(tl.int32), axis=1)
    tl.store(out + row * k + place, position, mask=exists)
