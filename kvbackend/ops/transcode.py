"""Turn pages of one record into pages of another that holds the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Rows, need, one_of
from ..codecs import records
from ..spec import op
from ._samples import Maker


@op(group="formats", exact=True)
def transcode(pages: Rows[Tensor, "nb page_bytes"], from_layout: str, to_layout: str, block_size: int) -> Tensor:
    """Turn pages of one record into pages of another that holds the same numbers, without decoding one.

    pages                    [nb, page_bytes] uint8, any strides
    from_layout, to_layout   names of records, see `kvbackend.formats`: what a prefill node on one vendor's devices
                             wrote becomes what a decode node on another's reads
    block_size               rows of a page, in both
    Returns [nb, page_bytes] uint8 of to_layout, contiguous. Codes, scales and the rotary part are the same bytes in
    another order, whatever they are; padding is zero. Scales that are powers of two (E8M0) become bfloat16 where
    to_layout has that, which is exact.

    Pairs of records that could lose something for some content are refused: other codes, other groups, scales that the
    target's type may not hold.
    Source: the records' readers, as listed in `kvbackend.formats`.
    """
    source, target = formats.record(from_layout), formats.record(to_layout)
    return records.reorder_pages(pages, source, target, block_size)


@transcode.check
def _(pages, from_layout, to_layout, block_size, **_):
    source, target = formats.record(from_layout), formats.record(to_layout)
    reason = records.why_not(source, target)
    if reason:
        others = [formats.record(name) for name in formats.record_names()]
        fitting = [other.name for other in others if records.why_not(source, other) is None and other != source]
        allowed = f"{from_layout} can become {one_of(fitting)}" if fitting else f"{from_layout} can become no other"
        need(
            False, f"to_layout is {to_layout!r}; {reason}, {allowed}: unpack_record and pack_record code the rows again"
        )
    page_bytes = source.page_bytes(block_size)
    need(
        pages.dtype is torch.uint8,
        f"pages is {pages.dtype}; records are bytes, torch.uint8: pass the pages as they are stored",
    )
    need(
        pages.shape[1] == page_bytes,
        f"pages has {pages.shape[1]} bytes a page; {from_layout} with {block_size} rows has {page_bytes}: pass the "
        f"block_size and the record that the pages have",
    )


@transcode.fake
def _(pages, to_layout, block_size, **_):
    return pages.new_empty(pages.shape[0], formats.record(to_layout).page_bytes(block_size))


@transcode.samples
def _(device, dtype):
    make = Maker(device, dtype)

    def call(from_layout: str, to_layout: str, num_blocks: int, block_size: int) -> dict[str, Any]:
        size = num_blocks, formats.record(from_layout).page_bytes(block_size)
        pages = torch.randint(0, 256, size, generator=make.generator, dtype=torch.uint8).to(device)
        return dict(pages=pages, from_layout=from_layout, to_layout=to_layout, block_size=block_size)

    for source in formats.record_names():
        for target in formats.record_names():
            if records.why_not(formats.record(source), formats.record(target)) is None:
                yield f"{source} to {target}", call(source, target, 3, 5)
    pair = "v32_fp8_656", "v32_fp8_656_ascend"
    yield "one row", call(*pair, 4, 1)
    yield "no pages", call(*pair, 0, 16)
    yield "production", call("v4_fp8_584", "v4_fp8_640_ascend", 8, 64)
    whole = call(*pair, 6, 4)
    yield "every other page", whole | dict(pages=whole["pages"][::2])
