"""Kept rows to the front of their sequences, by way of a buffer."""

import triton
import triton.language as tl


@triton.jit
def slots_at(position, exists, table, table_column, max_blocks, block_size):
    """Block and row in it of positions [N] whose tables [N] are pointers, and which are in a block."""
    column = position // block_size
    inside = exists & (column < max_blocks)
    block = tl.load(table + column.to(tl.int64) * table_column, mask=inside, other=-1).to(tl.int64)
    return block, position % block_size, inside & (block >= 0)


@triton.jit
def compact_cache(
    cache, cache_b, cache_s, cache_h, step_0, step_1, step_2, buffer, block_table, table_b, table_column, max_blocks,
    block_size, kept, kept_b, kept_h, kept_n, num_sets, first, count, num_rows, size_1, size_2, row_size,
    INTO_BUFFER: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept rows first to first + count - 1 of each set into the buffer [sets, count, row_size], or from there to
    their places.

    A row is a box of three dims with the strides step_0 to step_2; FLAT: of one, step_2. Program: (tile of rows, tile
    of a row's elements). A row that stays where it is is not touched.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, h, j = (r // count // num_sets).to(tl.int64), (r // count % num_sets).to(tl.int64), first + r % count
    source = tl.load(kept + b * kept_b + h * kept_h + j.to(tl.int64) * kept_n, mask=r < num_rows, other=-1).to(tl.int32)
    moves = (source >= 0) & (source != j)
    table = block_table + b * table_b
    block, offset, found = slots_at(source, moves, table, table_column, max_blocks, block_size)
    to_block, to_offset, to_found = slots_at(j, moves, table, table_column, max_blocks, block_size)
    if not INTO_BUFFER:
        block, offset = to_block, to_offset
    at = tl.where(found, block * cache_b + offset * cache_s + h * cache_h, 0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if FLAT:
        step = n.to(tl.int64) * step_2
    else:
        i, k, m = (n // (size_1 * size_2)).to(tl.int64), (n // size_2 % size_1).to(tl.int64), (n % size_2).to(tl.int64)
        step = i * step_0 + k * step_1 + m * step_2
    inside = (found & to_found)[:, None] & (n < row_size)[None, :]
    in_cache = cache + at[:, None] + step[None, :]
    in_buffer = buffer + r.to(tl.int64)[:, None] * row_size + n[None, :]
    if INTO_BUFFER:
        tl.store(in_buffer, tl.load(in_cache, mask=inside), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=inside), mask=inside)
