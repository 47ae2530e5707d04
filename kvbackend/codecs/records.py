"""Records: rows packed with their scales and rotary dims into pages of bytes, as other engines read and write them.

`formats.record` says where each byte goes; here stands what the bytes mean. A row's first channels are coded, as many
as the record has codes; the 64 after them are the rotary part, bfloat16, or E4M3 without a scale in `v32_nvfp4_352`.

Sources: FlashMLA (tests/quant.py; MODEL1 of 2026-04, V4.1 of 2026-09-30); vLLM 0.33 (csrc/cache_kernels.cu, fp8_ds_mla,
nvfp4_ds_mla); SGLang 0.5.23; DeepGEMM (index keys); vllm-ascend and CANN's kv_compress_epilog.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from .. import formats
from ..arrays import need, one_of
from ..formats import Field, Record
from . import grids
from .grids import GRIDS

RULES = ("pow2_ceil", "amax")
# records whose readers take a NaN scale to mean 16 unusable channels; elsewhere a NaN is coded as 0
NAN_SCALES = ("v41_fp4_288", "v41_fp4_288_planar")


def pack_record(rows: Tensor, record_name: str, rule: str = "pow2_ceil", floor: float | None = None) -> Tensor:
    """Pages of a record from rows.

    rows         [nb, bs, width], any float dtype; width is what the record holds: 512 and 64 (rotary part last) for
                 DeepSeek-V3.2, 512 for V4 and V4.1, 128 for index keys
    record_name  one of `formats.record_names()`
    rule         how a scale stored in float32 comes about: "pow2_ceil", as FlashMLA's tests and index keys have it, or
                 "amax", the bare amax / 448 that vLLM writes into the 656-byte record; other records have one rule
    floor        the smallest amax a scale is made for; None: 0.0448 for powers of two in the 656-byte record (FlashMLA
                 holds amax / 448 at 1e-4), 1e-4 in other E4M3 records (DeepSeek, vLLM; SGLang has 0.0448), 6 * 2^-126
                 for E2M1 with powers of two, 6 * 2^-9 for E2M1 with E4M3 scales
    Returns [nb, page_bytes] uint8, contiguous; padding is zero.
    NaN and infinities: see the package; the bfloat16 part keeps them.
    """
    record = formats.record(record_name)
    width = sum(record.dims)
    need(rule in RULES, f"rule is {rule!r}; it must be {one_of(RULES)}: choose one")
    need(
        rows.dim() == 3 and rows.shape[-1] == width,
        f"rows has shape {list(rows.shape)}; {record_name} takes [blocks, rows of a block, {width}]: reshape it",
    )
    codes, scales = _field(record, "codes"), _field(record, "scales")
    coded = codes.count * (2 if codes.dtype == "uint8" else 1)
    fields = dict(zip(("codes", "scales"), _encode(rows[..., :coded], record, codes, scales, rule, floor), strict=True))
    if coded < width:
        rope = rows[..., coded:]
        as_bfloat16 = _field(record, "rope").dtype == "bfloat16"
        fields["rope"] = rope.to(torch.bfloat16) if as_bfloat16 else grids.e4m3_codes(grids.without_nan(rope))
    return join_pages(fields, record)


def unpack_record(pages: Tensor, record_name: str, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows [nb, block_size, width] in `dtype` from pages [nb, page_bytes] uint8.

    Computed in float32 (code * scale) and rounded to `dtype` once; padding is not looked at.
    """
    record = formats.record(record_name)
    fields = split_pages(pages, record, block_size)
    grid = GRIDS[_field(record, "codes").dtype]
    scales = grids.scale_values(fields["scales"])
    if record.name == "v32_nvfp4_352":
        scales = scales.unflatten(-1, (4, 8)).mT.flatten(-2)
    values = grid.values(fields["codes"])
    rows = values * scales.repeat_interleave(values.shape[-1] // scales.shape[-1], -1)
    if "rope" in fields:
        rows = torch.cat((rows, fields["rope"].to(torch.float32)), -1)
    return rows.to(dtype)


def split_pages(pages: Tensor, record: Record, block_size: int) -> dict[str, Tensor]:
    """The fields of pages [nb, page_bytes] uint8: name -> [nb, block_size, count] in the field's dtype, copied."""
    page_bytes = record.page_bytes(block_size)
    need(
        pages.dtype is torch.uint8 and pages.dim() == 2 and pages.shape[1] == page_bytes,
        f"pages is {pages.dtype} of shape {list(pages.shape)}; {record.name} with {block_size} rows has "
        f"pages of torch.uint8 [blocks, {page_bytes}]: pass such pages",
    )
    fields, start = {}, 0
    for plane, plane_bytes in zip(record.planes, record.plane_bytes, strict=True):
        # not -1: there may be no pages
        rows = pages[:, start : start + block_size * plane_bytes].unflatten(1, (block_size, plane_bytes))
        start += block_size * plane_bytes
        offset = 0
        for field in plane:
            # little-endian: numbers are read as the machine has them
            field_bytes = rows[..., offset : offset + field.bytes].contiguous()
            offset += field.bytes
            if field.name != "pad":
                fields[field.name] = field_bytes.view(getattr(torch, field.dtype))
    return fields


def join_pages(fields: dict[str, Tensor], record: Record) -> Tensor:
    """Pages [nb, page_bytes] uint8 from fields as `split_pages` gives them; padding is zero.

    With `split_pages` it moves rows between records of one content in different orders, byte for byte.
    """
    assert sys.byteorder == "little", "records are little-endian, and numbers are stored as this machine has them"
    num_blocks, block_size = fields["codes"].shape[:2]
    planes = []
    for plane in record.planes:
        parts = []
        for field in plane:
            if field.name == "pad":
                parts.append(fields["codes"].new_zeros((num_blocks, block_size, field.bytes), dtype=torch.uint8))
            else:
                parts.append(fields[field.name].contiguous().view(torch.uint8))
        planes.append(torch.cat(parts, -1).flatten(1))
    padding = record.page_bytes(block_size) - block_size * record.row_bytes
    planes.append(planes[0].new_zeros((num_blocks, padding)))
    return torch.cat(planes, 1)


def reorder_pages(pages: Tensor, source: Record, target: Record, block_size: int) -> Tensor:
    """Pages [nb, page_bytes] of one record as pages of another that holds the same numbers; see `why_not`.

    Bytes move; scales that are powers of two (E8M0) become bfloat16 where the target has that, NaN stays NaN.
    """
    fields = split_pages(pages, source, block_size)
    dtype = getattr(torch, _field(target, "scales").dtype)
    if fields["scales"].dtype is not dtype:
        values = grids.scale_values(fields["scales"])
        # torch gives NaN other bits in a vector than alone
        fields["scales"] = values.to(dtype).masked_fill(values.isnan(), torch.nan)
    return join_pages(fields, target)


def why_not(source: Record, target: Record) -> str | None:
    """Why pages of one record cannot become pages of another for every content, to the bit; None if they can."""
    if (source.holds, source.dims) != (target.holds, target.dims):
        return f"{target.name} holds {target.holds} of {target.dims} numbers, not {source.holds} of {source.dims}"
    have, want = _contents(source), _contents(target)
    if {**have, "scales": None} != {**want, "scales": None}:
        return f"{target.name} has other codes, and coding numbers again loses some of each"
    if have["scales"] == want["scales"]:
        return None
    (dtype, count), (wanted_dtype, wanted_count) = have["scales"], want["scales"]
    if count != wanted_count:
        return f"{target.name} has {wanted_count} scales in a row, not {count}"
    if (dtype, wanted_dtype) == ("float8_e8m0fnu", "bfloat16"):
        return None  # every power of two from 2^-127 to 2^127 is a bfloat16
    return f"scales in {dtype} may be any number, and {target.name}'s {wanted_dtype} cannot hold them all"


def _contents(record: Record) -> dict[str, tuple[str, int]]:
    fields = [field for plane in record.planes for field in plane if field.name != "pad"]
    return {field.name: (field.dtype, field.count) for field in fields}


def _field(record: Record, name: str) -> Field:
    return next(field for plane in record.planes for field in plane if field.name == name)


def smallest_amax(record: Record) -> float | None:
    """The smallest amax that a power of two is made for by default; None: the rule's own."""
    return 0.0448 if record.name.startswith("v32_fp8") else None


def _encode(
    x: Tensor, record: Record, codes: Field, scales: Field, rule: str, floor: float | None
) -> tuple[Tensor, Tensor]:
    """Codes [nb, bs, codes.count] and scales [nb, bs, scales.count] as the record stores them."""
    grid, group = GRIDS[codes.dtype], x.shape[-1] // scales.count
    broken = x.isnan()
    x = grids.without_nan(x)
    if record.name in NAN_SCALES:
        broken = broken.unflatten(-1, (scales.count, group)).any(-1)
        x = x.masked_fill(broken.repeat_interleave(group, -1), 0)
    amax = grids.magnitude(x).unflatten(-1, (scales.count, group)).amax(-1)
    if scales.dtype == "float8_e4m3fn":
        found = grids.make_scales(amax, grid, "e4m3", floor)
    elif codes.dtype == "int8" or (scales.dtype == "float32" and rule == "amax"):
        smallest = torch.finfo(torch.float32).tiny * grid.largest  # vLLM: the scale is at least FLT_MIN
        floor = smallest if floor is None and codes.dtype != "int8" else floor
        dtype = getattr(torch, scales.dtype)
        found = grids.make_scales(amax, grid, "amax", floor).clamp(max=torch.finfo(dtype).max).to(dtype)
    else:
        found = grids.make_scales(amax, grid, "pow2_ceil", smallest_amax(record) if floor is None else floor)
        if scales.dtype != "float8_e8m0fnu":
            found = grids.scale_values(found).to(getattr(torch, scales.dtype))
    y = x / grids.scale_values(found).repeat_interleave(group, -1)
    # Ascend's index keys round to nearest even, unlike the format int8
    stored = grid.codes(y.round() if codes.dtype == "int8" else y)
    if record.name in NAN_SCALES:
        found = found.view(torch.uint8).masked_fill(broken, 0x7F).view(torch.float8_e4m3fn)
    if record.name == "v32_nvfp4_352":  # the scale of block s at byte 8 * (s & 3) + (s >> 2)
        found = found.view(torch.uint8).unflatten(-1, (8, 4)).mT.flatten(-2).view(torch.float8_e4m3fn)
    return stored, found
