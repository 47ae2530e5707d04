"""Write rows that are one vector each into their slots of pages, plain or packed as records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float, Index, Rows
from ..spec import op
from . import _checks, _pages
from ._samples import Pages


@op(group="paged cache", mutates=("cache",), exact=True)
def store_rows(
    rows: Float[Tensor, "T width"],
    cache: Rows[Tensor, "nb *page"],
    slot_mapping: Index[Tensor, "<=T"],
    kv_format: str = "auto",
    block_size: int = -1,
) -> None:
    """Write rows of one vector each, such as V4's shared key-values or index keys, to their slots of pages.

    rows           [T, width]; any strides
    cache          written in place: [nb, bs, width] in rows' dtype, any strides, or uint8 [nb, page_bytes] of records
    slot_mapping   slot of each row, block * bs + offset; -1 skips the row. It may be shorter than rows (graph
                   padding): the rows beyond it are skipped
    kv_format      "auto", or the record that the pages hold, see `kvbackend.formats`: rows are packed by its own rule,
                   bit for bit as `kvbackend.codecs.records.pack_record` does
    block_size     rows of a page of records; -1: as many as fit, which is wrong only where a page is padded by more
                   than a row (records of index keys with a page_align)

    Undefined: two rows with one slot; on accelerators, a slot outside the cache.
    Source: slots as in vLLM (arXiv 2309.06180, section 4); records as listed in `kvbackend.formats`.
    """
    _pages.write(cache, kv_format, slot_mapping, rows[: slot_mapping.shape[0]], block_size)


@store_rows.check
def _(rows, cache, kv_format, block_size, **_):
    _pages.check_pages("cache", cache, kv_format, "rows", rows, ("mla", "shared_kv", "index_key"), block_size)


@store_rows.values
def _(cache, slot_mapping, kv_format, block_size, **_):
    num_slots = cache.shape[0] * _pages.block_size_of(cache, kv_format, block_size)
    _checks.within("slot_mapping", slot_mapping, -1, num_slots, "slot", "-1 skips a row")


@store_rows.fake
def _(**_):
    return None


@store_rows.samples
def _(device, dtype):
    def call(pages: Pages, width: int, count: int, kv_format: str = "auto", **other: Any) -> dict[str, Any]:
        if kv_format == "auto":
            cache = torch.full((pages.num_blocks, pages.block_size, width), torch.nan, dtype=dtype, device=device)
        else:
            page_bytes = formats.record(kv_format).page_bytes(pages.block_size)
            cache = torch.full((pages.num_blocks, page_bytes), 255, dtype=torch.uint8, device=device)
        arguments = dict(rows=pages.randn(count, width), cache=cache, slot_mapping=pages.slots(count))
        return {**arguments, "kv_format": kv_format, **other}

    small = Pages(device, dtype)
    yield "plain", call(small, 24, 13)
    for name in formats.record_names():
        yield name, call(small, sum(formats.record(name).dims), 13, name, block_size=4)
    yield "as many as fit", call(Pages(device, dtype, block_size=64), 512, 5, "v4_fp8_584")
    yield "one row a page", call(Pages(device, dtype, num_blocks=20, block_size=1), 512, 13, "v4_fp8_584")
    yield "padding", call(small, 24, 3, slot_mapping=small.ints([-1, 3, -1], torch.int64))
    yield "padding, records", call(small, 512, 3, "v41_fp4_288", slot_mapping=small.ints([-1, 3, -1]))
    yield "fewer slots than rows", call(small, 512, 8, "v41_fp8_528", slot_mapping=small.slots(5))
    yield "zero rows", call(small, 512, 2, "v4_fp8_584", rows=small.randn(2, 512) * 0)
    yield "empty", call(small, 24, 0)
    yield "empty, records", call(small, 512, 0, "v41_fp8_528")
    yield "no blocks", call(Pages(device, dtype, num_blocks=0), 24, 2, slot_mapping=small.ints([-1, -1]))
    yield "sliced rows", call(small, 24, 5, rows=small.randn(5, 60)[:, 20:44])
    yield "expanded rows", call(small, 24, 5, rows=small.randn(1, 24).expand(5, -1))
    wide = torch.full((7, 4, 60), torch.nan, dtype=dtype, device=device)
    yield "slice of a cache", call(small, 24, 5, cache=wide[..., 8:32])
    yield "production", call(Pages(device, dtype, num_blocks=3, block_size=64), 512, 70, "v4_fp8_584")
