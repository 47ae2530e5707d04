"""Rows move by way of a buffer, as many at a time as it has room for: those of later turns lie behind all targets."""

import torch

from . import boxes, launching, rows

BUFFER_BYTES = 1 << 26


def unsupported(cache, **_):
    if cache.ndim > 5:
        yield f"cache has {cache.ndim} dims; the Triton kernel moves rows of up to three: flatten the row's dims"


def run(cache, block_table, kept):
    from ...triton.compact_cache import compact_cache

    num_seqs, num_sets, most = kept.shape
    if 0 in (*kept.shape, *cache.shape, block_table.shape[1]):
        return
    cache = launching.as_integers(cache)
    row = 2 if num_sets == 1 else 3  # the first dim of what moves together
    sizes, (steps,) = boxes.collapse(cache.shape[row:], cache.stride()[row:])
    filler = boxes.DIMS - len(sizes)
    sizes, steps = [1] * filler + sizes, [0] * filler + steps
    row_size = sizes[0] * sizes[1] * sizes[2]
    sets = num_seqs * num_sets
    step = min(max(BUFFER_BYTES // (sets * row_size * cache.element_size()), 1), most)
    buffer = torch.empty(sets * step, row_size, dtype=cache.dtype, device=cache.device)
    tiles = rows.tile(min(row_size, rows.TILE))
    for first in range(0, most, step):
        count = min(step, most - first)
        for into_buffer in (True, False):
            launching.launch(
                compact_cache,
                (launching.cdiv(sets * count, tiles["ROWS"]), launching.cdiv(row_size, tiles["BLOCK_D"])),
                cache, *cache.stride()[:2], 0 if num_sets == 1 else cache.stride(2), *steps, buffer, block_table,
                *block_table.stride(), block_table.shape[1], cache.shape[1], kept, *kept.stride(), num_sets, first,
                count, sets * count, sizes[1], sizes[2], row_size, INTO_BUFFER=into_buffer,
                FLAT=sizes[0] * sizes[1] == 1, ROWS=tiles["ROWS"], BLOCK=tiles["BLOCK_D"],
            )  # fmt: skip
