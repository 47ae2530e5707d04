"""What this machine can do at most: loops that only copy, only read, only multiply (csrc/cpu/probes.cpp)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch

from ..cache.crossover import device_name
from ..layouts import empty_pages
from ..native import FOLDER, library

POOL_BYTES = 1 << 30  # more than caches hold
READ_BYTES = 1 << 26  # that a run reads
ROUNDS = 5


@dataclass(frozen=True)
class Limit:
    """A loop that does nothing else, and how much of it a run does."""

    name: str
    unit: str
    work: float  # bytes or operations
    run: Callable[[], Any]

    @staticmethod
    @cache
    def of(name: str) -> Limit:
        """A limit by its name in LIMITS; its buffers are kept."""
        return LIMITS[name]()

    def rate(self) -> float:
        """The best of several runs, in GB/s or GFLOP/s."""
        self.run()
        best = float("inf")
        for _ in range(ROUNDS):
            start = time.perf_counter()
            self.run()
            best = min(best, time.perf_counter() - start)
        return round(self.work / best / 1e9, 1)


def _copy() -> Limit:
    source = torch.ones(READ_BYTES // 4)
    target = torch.empty_like(source)
    return Limit("copy_gbs", "GB/s", 2.0 * source.nbytes, lambda: target.copy_(source))


@cache
def _pool() -> torch.Tensor:
    return empty_pages(POOL_BYTES // 4, dtype=torch.float32, device="cpu").fill_(1)


def _read(name: str, row_bytes: int, shuffled: bool) -> Limit:
    """Read other rows of a large pool each time, in order or not."""
    rows = POOL_BYTES // row_bytes
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)) if shuffled else torch.arange(rows)
    offsets, count = order * row_bytes, READ_BYTES // row_bytes // 4 * 4
    parts = cycle(offsets[: rows // count * count].split(count))
    probe = _probe("kvbackend_probe_read", ctypes.c_float, 4)
    return Limit(
        name, "GB/s", float(count * row_bytes),
        lambda: probe(_pool().data_ptr(), next(parts).data_ptr(), count, row_bytes),
    )  # fmt: skip


def _arithmetic(name: str, loop: str, rounds: int) -> Limit:
    probe = _probe(f"kvbackend_probe_{loop}", ctypes.c_double, 2)
    run = partial(probe, rounds, torch.get_num_threads())
    return Limit(name, "GFLOP/s", run(), run)


def _probe(name: str, result: Any, arguments: int) -> Callable[..., Any]:
    function = getattr(ctypes.CDLL(str(FOLDER / "libkvbackend_cpu.so")), name)
    function.restype, function.argtypes = result, [ctypes.c_int64] * arguments
    return function


LIMITS: dict[str, Callable[[], Limit]] = {
    "copy_gbs": _copy,
    "read_gbs": partial(_read, "read_gbs", 1 << 20, False),
    "paged_read_gbs": partial(_read, "paged_read_gbs", 1 << 15, True),  # a block of 16 tokens of 8 heads of 128
    "row_read_gbs": partial(_read, "row_read_gbs", 1152, True),  # an MLA row
    "fp32_gflops": partial(_arithmetic, "fp32_gflops", "multiply", 1 << 18),
    "bf16_gflops": partial(_arithmetic, "bf16_gflops", "products", 1 << 16),
}


def matrix_limit() -> str:
    """What bounds products of matrices here: those of bfloat16 where the kernels make them."""
    return "bf16_gflops" if library("cpu").isa in ("avx512_bf16", "amx") else "fp32_gflops"


def limits() -> dict[str, float]:
    """Every limit, with the threads that torch uses: GB/s, and GFLOP/s of multiplying."""
    names = [name for name in LIMITS if name in (matrix_limit(), "fp32_gflops") or not name.startswith("bf16")]
    if library("cpu").reason:
        names = ["copy_gbs"]
    return {name: Limit.of(name).rate() for name in names}


def machine() -> str:
    """The CPU's name, the number of threads that torch uses, and the kernels' instruction set."""
    return f"{device_name(torch.device('cpu'))}, {library('cpu').isa or 'no'} kernels"
