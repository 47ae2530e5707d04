"""Copies of whole blocks."""

import triton
import triton.language as tl


@triton.jit
def copy_blocks(
    source, target, mapping, pair, side, source_block, target_block,
    source_0, source_1, source_2, target_0, target_1, target_2, size_1, size_2, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """target[b] = source[a] for the pairs (a, b) of mapping, whose strides are `pair` and `side`; one with -1 is not.

    A page is a box of three dims, each with strides in source and target. Program: (pair, tile of the page).
    """
    at = mapping + tl.program_id(0).to(tl.int64) * pair
    a, b = tl.load(at).to(tl.int64), tl.load(at + side).to(tl.int64)
    if (a >= 0) & (b >= 0):
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        i, j, k = (n // (size_1 * size_2)).to(tl.int64), (n // size_2 % size_1).to(tl.int64), (n % size_2).to(tl.int64)
        inside = n < page_size
        number = tl.load(source + a * source_block + i * source_0 + j * source_1 + k * source_2, mask=inside)
        tl.store(target + b * target_block + i * target_0 + j * target_1 + k * target_2, number, mask=inside)
