"""Pages of records as the kernels take them: views of each field, no copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ... import formats
from ...ops import _pages
from .cached import CODES, SCALES, Operand, bytes_of, plain


def unsupported(kv_format: str) -> Iterator[str]:
    """Why the kernels cannot read a record."""
    if kv_format == "v32_nvfp4_352":
        yield (
            f"kv_format is {kv_format!r}, whose scales are shuffled; the Triton kernels read scales in order: "
            f"keep rows in another record"
        )


def byte_fields(pages: Tensor, kv_format: str, block_size: int) -> dict[str, Tensor]:
    """The fields of pages [nb, page_bytes]: name -> view [nb, block_size, bytes of a row]."""
    record, found, start = formats.record(kv_format), {}, 0
    for plane, plane_bytes in zip(record.planes, record.plane_bytes, strict=True):
        rows = pages[:, start : start + block_size * plane_bytes].unflatten(1, (block_size, plane_bytes))
        start, offset = start + block_size * plane_bytes, 0
        for field in plane:
            found[field.name] = rows[..., offset : offset + field.bytes]
            offset += field.bytes
    return found


def fields(pages: Tensor, kv_format: str, block_size: int) -> dict[str, Tensor]:
    """The fields of pages [nb, page_bytes]: name -> view [nb, block_size, count] in the field's dtype."""
    found = byte_fields(pages, kv_format, block_size)
    return {name: view.view(getattr(torch, dtype_of(kv_format, name))) for name, view in found.items()}


def dtype_of(kv_format: str, name: str) -> str:
    """The dtype of a field."""
    return next(field.dtype for plane in formats.record(kv_format).planes for field in plane if field.name == name)


def operand(pages: Tensor, kv_format: str, block_size: int) -> tuple[Operand, Tensor | None]:
    """Rows of pages, plain [nb, bs, width] or records, and the rotary part that a record has beside them."""
    if kv_format == "auto":
        return plain(pages.unsqueeze(2)), None
    parts = fields(pages, kv_format, _pages.block_size_of(pages, kv_format, block_size))
    codes, scales = parts["codes"], parts["scales"]
    width = codes.shape[2] * (2 if codes.dtype is torch.uint8 else 1)
    constants = dict(
        CODE=CODES[str(codes.dtype).removeprefix("torch.")], SCALE=SCALES[str(scales.dtype).removeprefix("torch.")],
        GROUP=0 if scales.shape[2] == 1 else width // scales.shape[2], GLOBAL=False,
    )  # fmt: skip
    strides = (scales.stride(0), scales.stride(1), 0, scales.stride(2), 0, 1)
    rows = (bytes_of(codes), codes.stride(0), codes.stride(1), 0, codes.stride(2))
    return Operand(rows, (bytes_of(scales), *strides), bytes_of(scales), constants), parts.get("rope")
