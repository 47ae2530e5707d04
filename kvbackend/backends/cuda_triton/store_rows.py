from typing import Any

import torch
from torch import Tensor

from ... import formats
from ...codecs import grids
from ...codecs.records import NAN_SCALES, smallest_amax
from ...ops import _formats, _pages
from . import cached, launching, records
from . import rows as rows_of

TILE = 2048  # elements of a program, about


def unsupported(rows, **_):
    yield from launching.floats(rows=rows)


def run(rows, cache, slot_mapping, kv_format, block_size):
    if kv_format == "auto":
        rows_of.write(_formats.Cached("cache", cache, kv_format), slot_mapping, rows)
        return
    from ...triton.store_rows import store_rows

    num_rows = min(rows.shape[0], slot_mapping.shape[0])
    if cache.shape[0] == 0 or num_rows == 0:
        return
    block_size = _pages.block_size_of(cache, kv_format, block_size)
    parts = records.fields(cache, kv_format, block_size)
    codes, scales = parts["codes"], parts["scales"]
    none = cache[:, None, :0]
    rope, pad = parts.get("rope", none), parts.get("pad", none)
    coded = rows.shape[1] - rope.shape[2]
    block = launching.power_of_two(coded)
    fields = [(cached.bytes_of(field), field.stride(0), field.stride(1)) for field in (codes, scales, rope, pad)]
    per_program = max(TILE // block, 1)
    launching.launch(
        store_rows, (launching.cdiv(num_rows, per_program),), rows, *rows.stride(), slot_mapping,
        slot_mapping.stride(0), *(part for field in fields for part in field), block_size, num_rows,
        **encoding(kv_format, codes, scales), GROUP=coded // scales.shape[2], CODED=coded, ROPE=rope.shape[2],
        PAD=pad.shape[2], ROWS=per_program, BLOCK_D=block, BLOCK_PE=launching.power_of_two(rope.shape[2]),
        BLOCK_PAD=launching.power_of_two(pad.shape[2]), enable_fp_fusion=False,
    )  # fmt: skip


def encoding(kv_format: str, codes: Tensor, scales: Tensor) -> dict[str, Any]:
    """The record's rule, as constants."""
    storage, smallest = str(codes.dtype).removeprefix("torch."), smallest_amax(formats.record(kv_format))
    grid = grids.GRIDS[storage]
    rule, floor = "pow2_ceil", grid.floor if smallest is None else smallest
    if scales.dtype is torch.float8_e4m3fn:
        rule, floor = "e4m3", grids.SMALLEST_E4M3_SCALE
    elif codes.dtype is torch.int8:
        rule, floor = "amax", grids.SMALLEST_SCALE
    return dict(
        CODE=cached.CODES[storage], LARGEST=grid.largest, EMAX=grid.emax, FLOOR=floor, RULE=rule,
        NAN_SCALES=kv_format in NAN_SCALES, SHUFFLED=kv_format == "v32_nvfp4_352",
    )  # fmt: skip
