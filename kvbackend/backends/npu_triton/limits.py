"""Up to which sizes the kernels were compiled for an Ascend 950 (tests/npu_triton/check.py)."""

from __future__ import annotations

from collections.abc import Iterator

from ... import formats
from ...codecs import split

WIDEST = 2048  # numbers of a row: a tile has one row at least, and all of it lies in UB
WIDEST_PACKED = 128  # numbers of a head of 4 bits: beyond, some tiles overflow UB and some end by an assertion


def widths(**numbers: int) -> Iterator[str]:
    """Why rows of so many numbers cannot be taken."""
    for name, number in numbers.items():
        if number > WIDEST:
            yield (
                f"{name} has rows of {number} numbers; the Triton kernels were compiled for an Ascend 950 with up to "
                f"{WIDEST}: use the reference"
            )


def packed_heads(kv_format: str, **numbers: int) -> Iterator[str]:
    """Why heads of so many numbers cannot be taken in a format of two numbers to a byte."""
    if not any(side != "auto" and split.per_byte(formats.get(side)) > 1 for side in formats.pair(kv_format)):
        return
    for name, number in numbers.items():
        if number > WIDEST_PACKED:
            yield (
                f"{name} has heads of {number} numbers in {kv_format}; the Triton kernels were compiled for an Ascend "
                f"950 with up to {WIDEST_PACKED} of 4 bits: choose a format of 8"
            )
