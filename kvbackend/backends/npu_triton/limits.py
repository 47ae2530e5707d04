"""Up to which sizes the kernels were compiled for an Ascend 950 (tests/npu_triton/check.py)."""

from __future__ import annotations

from collections.abc import Iterator

WIDEST = 2048  # numbers of a row: a tile has one row at least, and all of it lies in UB


def widths(**numbers: int) -> Iterator[str]:
    """Why rows of so many numbers cannot be taken."""
    for name, number in numbers.items():
        if number > WIDEST:
            yield (
                f"{name} has rows of {number} numbers; the Triton kernels were compiled for an Ascend 950 with up to "
                f"{WIDEST}: use the reference"
            )
