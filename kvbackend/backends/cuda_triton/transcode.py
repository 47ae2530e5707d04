from typing import Any

import torch

from ... import formats
from . import launching, records

ROWS = 16  # of a program, at most


def unsupported(**_):
    return ()


def run(pages, from_layout, to_layout, block_size):
    from ...triton.transcode import transcode

    record = formats.record(to_layout)
    out = pages.new_empty(pages.shape[0], record.page_bytes(block_size))
    pages = pages if pages.stride(1) == 1 else pages.contiguous()
    source, target = (records.byte_fields(*of, block_size) for of in ((pages, from_layout), (out, to_layout)))
    none, fields = out[:, None, :0], []
    constants: dict[str, Any] = {"SCALES_HOW": "copy"}
    for name, prefix in (("codes", "CODES"), ("rope", "ROPE"), ("scales", "SCALES")):
        have, want = source.get(name, none), target.get(name, none)
        if name == "scales" and have.shape != want.shape:  # a byte each becomes a bfloat16
            constants["SCALES_HOW"], want = "e8m0", want.view(torch.int16)
        else:
            have, want = in_words(have, want)
        fields += [have, want]
        constants |= strides(prefix, have) | strides(f"TO_{prefix}", want) | widths(prefix, want)
    pad, end = target.get("pad", none), out[:, None, block_size * record.row_bytes :]
    rows = min(launching.power_of_two(block_size), ROWS)
    launching.launch(
        transcode, (pages.shape[0] * launching.cdiv(block_size, rows),), *fields, pad, end, block_size, **constants,
        **strides("PAD", pad), **widths("PAD", pad), END_B=end.stride(0), **widths("END", end), ROWS=rows,
    )  # fmt: skip
    return out


def in_words(*fields: torch.Tensor) -> list[torch.Tensor]:
    """The same bytes of fields [nb, bs, count] as the widest integers that all of them are made of."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        sizes = [(field.shape[2], field.storage_offset(), *field.stride()[:2]) for field in fields]
        if not any(size % dtype.itemsize for each in sizes for size in each):
            return [field.view(dtype) for field in fields]
    return list(fields)


def strides(prefix: str, field: torch.Tensor) -> dict[str, int]:
    """By page and by row."""
    return {f"{prefix}_B": field.stride(0), f"{prefix}_S": field.stride(1)}


def widths(prefix: str, field: torch.Tensor) -> dict[str, int]:
    """Words of a row, as they are and padded."""
    return {prefix: field.shape[2], f"{prefix}_BLOCK": launching.power_of_two(field.shape[2])}
