"""Pages whose rows are one vector each, plain or packed as records: their sizes, and rows in and out of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import need
from ..codecs.records import pack_record, unpack_record
from ..formats import Record
from . import _math


def record_of(kv_format: str) -> Record | None:
    """The record that a kv_format names; None for "auto": the pages read as their dtype says."""
    return None if kv_format == "auto" else formats.record(kv_format)


def block_size_of(pages: Any, kv_format: str, block_size: int = -1) -> Any:
    """Rows of a page. Of records as many as fit, unless told: padding is less than a row in all but index keys."""
    record = record_of(kv_format)
    if record is None:
        return pages.shape[1]
    return block_size if block_size > 0 else pages.shape[1] // record.row_bytes


def check_pages(
    name: str, pages: Any, kv_format: str, like_name: str, like: Any, holds: tuple[str, ...], block_size: int = -1
) -> None:
    """Pages [nb, bs, width] of like's dtype, or uint8 [nb, page_bytes] of a record that `holds` such rows."""
    record, width = record_of(kv_format), like.shape[-1]
    if record is None:
        need(
            pages.ndim == 3,
            f"{name} has {pages.ndim} dims; kv_format 'auto' has [blocks, rows of a block, {width}]: reshape it, or "
            f"name the record that it holds",
        )
        need(
            pages.dtype == like.dtype,
            f"{name} is {pages.dtype} but {like_name} is {like.dtype}; with kv_format 'auto' they must be of one "
            f"dtype: convert one of them",
        )
        need(
            pages.shape[2] == width,
            f"{name} holds rows of {pages.shape[2]} numbers; {like_name} has {width}: allocate it for this width",
        )
        return
    check_records(name, pages, kv_format, holds, block_size)
    need(
        width == sum(record.dims),
        f"{like_name} has rows of {width} numbers; {kv_format!r} holds {sum(record.dims)}: choose another format",
    )


def check_records(name: str, pages: Any, kv_format: str, holds: tuple[str, ...], block_size: int = -1) -> None:
    """Pages uint8 [nb, page_bytes] of a record that `holds` such rows."""
    record = formats.record(kv_format)
    need(
        record.holds in holds,
        f"kv_format is {kv_format!r}, whose records hold {record.holds}; {name} takes {' or '.join(holds)}: choose "
        f"one of {', '.join(n for n in formats.record_names() if formats.record(n).holds in holds)}",
    )
    need(
        pages.dtype == torch.uint8 and pages.ndim == 2,
        f"{name} is {pages.dtype} with {pages.ndim} dims; records of {kv_format!r} are torch.uint8 "
        f"[blocks, page_bytes]: pass such pages",
    )
    rows = block_size_of(pages, kv_format, block_size)
    page_bytes = -(-rows * record.row_bytes // record.page_align) * record.page_align
    need(
        pages.shape[1] == page_bytes,
        f"{name} has pages of {pages.shape[1]} bytes; {rows} rows of {kv_format!r} take {page_bytes}: allocate pages "
        f"of formats.record({kv_format!r}).page_bytes(block_size)",
    )


def write(pages: Tensor, kv_format: str, slots: Tensor, rows: Tensor, block_size: int = -1) -> None:
    """Write rows [N, width] to their slots, packed where the pages hold records; -1 skips a row."""
    record = record_of(kv_format)
    if record is None:
        _math.write_rows(pages, slots, rows)
        return
    packed = pack_record(rows[:, None], record.name)  # a page of one row each
    start = 0
    for plane, plane_bytes in _planes(pages, record, block_size_of(pages, kv_format, block_size)):
        _math.write_rows(plane, slots, packed[:, start : start + plane_bytes])
        start += plane_bytes


def gather(
    pages: Tensor, kv_format: str, block_table: Tensor, length: Tensor, dtype: torch.dtype, block_size: int = -1
) -> tuple[Tensor, Tensor]:
    """One sequence's rows in `dtype`, and which exist: as _math.gather_rows, with records unpacked."""
    record = record_of(kv_format)
    if record is None:
        rows, exists = _math.gather_rows(pages, block_table, length)
        return rows.to(dtype), exists
    parts = [
        _math.gather_rows(plane, block_table, length)
        for plane, _ in _planes(pages, record, block_size_of(pages, kv_format, block_size))
    ]
    exists = parts[0][1]
    packed = torch.cat([part for part, _ in parts], -1)  # [rows, row_bytes]
    padding = packed.new_zeros(len(packed), record.page_bytes(1) - record.row_bytes)
    rows = unpack_record(torch.cat((packed, padding), -1), record.name, 1)[:, 0].to(dtype)
    return rows.masked_fill(~exists[:, None], 0), exists


def _planes(pages: Tensor, record: Record, block_size: int) -> list[tuple[Tensor, int]]:
    """The planes of pages, views [nb, block_size, plane_bytes], and the bytes of a row in each."""
    planes, start = [], 0
    for plane_bytes in record.plane_bytes:
        plane = pages[:, start : start + block_size * plane_bytes].unflatten(1, (block_size, plane_bytes))
        planes.append((plane, plane_bytes))
        start += block_size * plane_bytes
    return planes


def rows_at(pages: Tensor, kv_format: str, slots: Tensor, dtype: torch.dtype, block_size: int = -1) -> Tensor:
    """Rows [N, width] in `dtype` of slots that are all in the pages; records unpacked."""
    record, rows = record_of(kv_format), block_size_of(pages, kv_format, block_size)
    block, offset = slots // rows, slots % rows
    if record is None:
        return pages[block, offset].to(dtype)
    packed = torch.cat([plane[block, offset] for plane, _ in _planes(pages, record, rows)], -1)
    padding = packed.new_zeros(len(packed), record.page_bytes(1) - record.row_bytes)
    return unpack_record(torch.cat((packed, padding), -1), record.name, 1)[:, 0].to(dtype)
