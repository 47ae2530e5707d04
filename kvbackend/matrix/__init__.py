"""What every op promises on every backend: the op's samples, run and compared with the reference.

A cell is one op, backend, device, dtype and sample, with a verdict. `judge` makes one, `children` runs many, each group
in a process of its own; `documents` is what `kvbackend matrix --json` writes, `merge` joins those of several machines,
`page` shows them in a browser. The contract test asserts the cells.
"""

from .judge import (
    DTYPES,
    STATUSES,
    TOLERANCES,
    Cell,
    cells,
    copy_arguments,
    difference,
    flat_results,
    in_float64,
    run_cell,
    summarize,
)

__all__ = [
    "DTYPES",
    "STATUSES",
    "TOLERANCES",
    "Cell",
    "cells",
    "copy_arguments",
    "difference",
    "flat_results",
    "in_float64",
    "run_cell",
    "summarize",
]
