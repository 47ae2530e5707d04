"""Times on an accelerator by its own events, and what a copy and a matmul reach beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

ROUNDS = 30


def median_us(call: Callable[[], Any], device: str, dry: bool) -> float:
    """The median of rounds that each start with a cold L2; dry, one call by the host's clock."""
    if dry:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    kind = getattr(torch, torch.device(device).type)  # torch.cuda or torch.npu
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(3):
        call()
    for _ in range(ROUNDS):
        flush.zero_()
        before, after = kind.Event(enable_timing=True), kind.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        taken.append(before.elapsed_time(after) * 1e3)
    return median(taken)


def ceilings(device: str, dry: bool) -> tuple[float, float]:
    """GB/s of a copy, read and written; TFLOP/s of a bfloat16 matmul."""
    source = torch.empty(1 << (16 if dry else 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / median_us(lambda: target.copy_(source), device, dry) / 1e3
    size = 64 if dry else 8192
    a = torch.randn(size, size).bfloat16().to(device)
    return copy, 2 * size**3 / median_us(lambda: a @ a, device, dry) / 1e6
