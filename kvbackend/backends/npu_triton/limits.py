"""Up to which sizes the kernels were compiled for an Ascend 950 (tests/npu_triton/check.py)."""

from __future__ import annotations

from collections.abc import Iterator

WIDEST = 2048  # numbers of a row: a tile has one row at least, and all of it lies in UB
WIDEST_INT4 = 128  # numbers of a head in int4, each with a scale and an offset beside it


def widths(**numbers: int) -> Iterator[str]:
    """Why rows of so many numbers cannot be taken."""
    for name, number in numbers.items():
        if number > WIDEST:
            yield (
                f"{name} has rows of {number} numbers; the Triton kernels were compiled for an Ascend 950 with up to "
                f"{WIDEST}: use the reference"
            )


def int4_heads(kv_format: str, **numbers: int) -> Iterator[str]:
    """Why heads of so many numbers cannot be taken in a format of int4."""
    for name, number in numbers.items():
        if "int4" in kv_format and number > WIDEST_INT4:
            yield (
                f"{name} has heads of {number} numbers in {kv_format}; the Triton kernels were compiled for an Ascend "
                f"950 with up to {WIDEST_INT4} of int4: choose another kv_format"
            )
