"""Move the kept rows of sequences to the front of their blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Index, Rows, need
from ..facts import fact
from ..spec import op
from . import _checks
from ._math import write_rows
from ._samples import NO_BLOCK, Maker, MlaPool, Pool


@op(group="evicting", mutates=("cache",), exact=True)
def compact_cache(
    cache: Rows[Tensor, "nb bs *row"],
    block_table: Index[Tensor, "B max_blocks"],
    kept: Index[Tensor, "B Hs n"],
) -> None:
    """Move the kept rows of each sequence to its front, in order, byte for byte, so that its last blocks can be freed.

    Row kept[b, h, j] of sequence b becomes its row j. Called once for each paged tensor of a layer: keys, values,
    scales per token, positions, biases.

    cache         [nb, bs, *row] of any dtype, written in place; any strides
    block_table   [B, max_blocks] blocks of each sequence; entries that no kept row and no target needs are not looked
                  at, -1 is no block
    kept          [B, Hs, n] rows to keep, ascending, then -1. Hs = 1: whole rows move. Hs = Hk > 1: the parts of each
                  kv head move on their own, in a cache [nb, bs, Hk, ...]; row j then holds another token in each head

    A row only moves forwards, so ascending order never overwrites what is still to be read: no copy is needed. Rows
    beyond the kept ones keep what they hold. A row from or to a block that is -1 is skipped.
    Undefined: rows not ascending, or kept twice; a block that two sequences of the call name; on accelerators, a block
    outside the cache.
    Source: the block tables of paged attention (arXiv 2309.06180, section 4); which rows are kept is a policy's choice.
    """
    _, num_sets, count = kept.shape
    if 0 in (*kept.shape, *cache.shape[:2], block_table.shape[1]):
        return
    # as integers: torch cannot index every dtype of a cache
    rows = cache.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.element_size()])
    block_size = rows.shape[1]
    target = torch.arange(count, device=kept.device)
    for head in range(num_sets):
        part = rows if num_sets == 1 else rows[:, :, head]
        source = kept[:, head].long()  # [B, n]
        from_slot = _slots(block_table, source, block_size)
        to_slot = _slots(block_table, torch.where(source >= 0, target, -1), block_size)
        to_slot = torch.where(from_slot >= 0, to_slot, -1).flatten()
        from_slot = from_slot.flatten().clamp(min=0)
        write_rows(part, to_slot, part[from_slot // block_size, from_slot % block_size])


def _slots(block_table: Tensor, position: Tensor, block_size: int) -> Tensor:
    """Slots of positions [B, n]; -1 where there is no position, or no block for it."""
    if 0 in (block_size, block_table.shape[1]):
        return torch.full_like(position, -1)
    index = position // block_size  # -1 for no position
    inside = (index >= 0) & (index < block_table.shape[1])
    block = block_table.long().gather(1, torch.where(inside, index, 0))
    return torch.where(inside & (block >= 0), block * block_size + position % block_size, -1)


@compact_cache.check
def _(cache, kept, **_):
    sets = kept.shape[1]
    heads = fact("(*cache.shape, 1)[2]", cache=cache)  # positions [nb, bs] are of all heads
    need(
        sets == 1 or sets == heads,
        f"kept has {sets} sets of rows and cache {heads} kv heads; it must have one set for whole rows, or one for "
        f"each head: pass select_tokens' result over scores of 1 or {heads} heads",
    )


@compact_cache.values
def _(cache, block_table, kept, **_):
    capacity = block_table.shape[1] * cache.shape[1]
    _checks.within("kept", kept, -1, capacity, "row", f"block_table covers {capacity} rows")
    before, after = kept[..., :-1].long(), kept[..., 1:].long()
    rises = (after == -1) | ((before >= 0) & (after > before))
    if not bool(rises.all()):
        b, h, j = (~rises).nonzero()[0].tolist()
        need(
            False,
            f"kept[{b}, {h}] has {kept[b, h, j + 1].item()} after {kept[b, h, j].item()}; rows must ascend, with -1 "
            f"only at the tail, for a row to be read before it is overwritten: sort them",
        )
    slots = _slots(block_table, kept.flatten(1).long(), cache.shape[1])
    _checks.within(
        "block_table", slots, -1, cache.shape[0] * cache.shape[1], "a block whose row has slot", "-1 is no block"
    )


@compact_cache.fake
def _(**_):
    return None


@compact_cache.samples
def _(device, dtype):
    def call(
        pool: Pool | MlaPool, kept: list[Any], seq_lens: list[int], part: int = 0, index: torch.dtype = torch.int32
    ) -> dict[str, Any]:
        """kept: a list of rows for each sequence, or one for each of its heads."""
        cache = pool.caches()[part]
        tables = pool.block_tables(seq_lens)
        pool.fill(cache, tables, seq_lens)
        width = max(map(len, tables), default=0) + 1
        padded = [table + [NO_BLOCK] * (width - len(table)) for table in tables]
        sets = [rows if rows and isinstance(rows[0], list) else [rows] for rows in kept]
        longest = max((len(rows) for each in sets for rows in each), default=0) + 1
        filled = [[rows + [-1] * (longest - len(rows)) for rows in each] for each in sets]
        return dict(
            cache=cache,
            block_table=pool.ints(padded, index).reshape(len(tables), width),
            kept=pool.ints(filled, index).reshape(len(sets), len(sets[0]) if sets else 1, longest),
        )

    some = [[0, 3, 4, 9, 18], [29]]
    for name, pool in Pool.variants(device, dtype):
        yield f"keys, {name}", call(pool, some, [19, 30])
        yield f"values, {name}", call(pool, some, [19, 30], part=1)
        by_head = [[sorted(pool.permutation(19)[:6].tolist()) for _ in range(pool.kv_heads)]]
        yield f"rows of each head, {name}", call(pool, by_head, [19])
    for name, mla in MlaPool.variants(device, dtype):
        yield f"latent, {name}", call(mla, [[0, 3, 8]], [9])
        yield f"rotary, {name}", call(mla, [[0, 3, 8]], [9], part=1)
    small = Pool(device, dtype)
    yield "all kept", call(small, [list(range(9))], [9])
    yield "none kept", call(small, [[], [2]], [9, 3])
    yield "last one kept", call(small, [[8], [0]], [9, 5])
    yield "overlapping runs", call(small, [[1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10]], [9, 11])
    yield "int64 rows", call(small, [[1, 5], [2]], [6, 3], index=torch.int64)
    uneven = call(small, [[[1, 5, 7], [0]], [[2], [0, 2]]], [8, 3])
    yield "heads keep different counts", uneven
    yield "strided rows", uneven | dict(kept=torch.stack((uneven["kept"], uneven["kept"]), -1)[..., 1])
    yield "empty batch", call(small, [], [])
    yield "no blocks", call(Pool(device, dtype, num_blocks=0), [[]], [0])
    holed = call(small, [[1, 6, 9], [2, 3]], [10, 4])
    holed["block_table"][0, 1] = -1
    yield "missing block", holed
    plain = call(small, [[1, 6, 9], [2, 3]], [10, 4])
    positions = torch.arange(small.num_blocks * small.block_size).reshape(small.num_blocks, small.block_size)
    yield "positions", plain | dict(cache=positions.int().to(device))
    biases = Maker(device, torch.float32).randn(small.num_blocks, small.block_size, small.kv_heads)
    yield "biases of each head", uneven | dict(cache=biases)
    codes = (torch.arange(14 * 4 * 37) % 251).to(torch.uint8).reshape(14, 4, 37).to(device)
    yield "byte records", plain | dict(cache=codes)
