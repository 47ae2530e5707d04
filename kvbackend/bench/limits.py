"""What this machine can do at most, measured."""

from __future__ import annotations

import torch

from ..cache.crossover import device_name
from ..native import library
from .timing import interleaved


def limits() -> dict[str, float]:
    """This machine's memory bandwidth, in GB/s: reading, and copying (bytes read plus written)."""
    source = torch.ones(1 << 26)  # 256 MiB
    target = torch.empty_like(source)
    times = interleaved({"read": source.sum, "copy": lambda: target.copy_(source)}, rounds=5)
    size_gb = source.nbytes / 1e9
    return {
        "read_gbs": round(size_gb / min(times["read"]) * 1e6, 1),
        "copy_gbs": round(2 * size_gb / min(times["copy"]) * 1e6, 1),
    }


def machine() -> str:
    """The CPU's name, the number of threads that torch uses, and the kernels' instruction set."""
    return f"{device_name(torch.device('cpu'))}, {library('cpu').isa or 'no'} kernels"
