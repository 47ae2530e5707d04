"""How triton-ascend is asked to compile and start a kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Grids beyond 65535 programs, and fewer than the cores there are: each core walks over programs (triton-ascend 3.2.0,
# backends/ascend/utils.py and runtime/jit.py). It asks for programs that do not wait for each other; none here does.
EVERY_GRID = "TRITON_ALL_BLOCKS_PARALLEL"
OPTIONS = {"compile_on_910_95": True}  # the 950 by its former name, which 3.2.0 does not find out by itself
CUDA_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")  # mean nothing there
CRASH, TRIES = "Stack dump", 4  # triton-adapter-opt of 3.2.0 crashes now and then, most often on compress_kv's kernel
_ONE_AT_A_TIME = threading.Lock()  # else a thread takes another's "1" for what was before


@cache
def compiles() -> bool:
    """Whether triton is triton-ascend here, which is installed into the same folder."""
    try:
        version("triton-ascend")
    except PackageNotFoundError:
        return False
    return True


@contextmanager
def every_grid() -> Iterator[None]:
    """Triton reads the variable when it compiles and at each launch; other kernels of the process keep theirs."""
    before = os.environ.get(EVERY_GRID)
    os.environ[EVERY_GRID] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[EVERY_GRID]
        else:
            os.environ[EVERY_GRID] = before


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Compile, where that is not done, and start a kernel on the current NPU and its stream."""
    own = {name: value for name, value in constants.items() if name not in CUDA_OPTIONS}
    with _ONE_AT_A_TIME, every_grid():
        for left in reversed(range(TRIES)):
            try:
                kernel[grid](*args, **own, **OPTIONS)
            except Exception as error:  # of a class that only triton-ascend has
                if not left or CRASH not in str(error):
                    raise
            else:
                return
