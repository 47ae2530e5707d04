"""Timing that can be trusted on a shared machine: candidates interleaved in shuffled rounds, medians of paired ratios.

`dispatch_overhead` measures what choosing costs on top of a plain `torch.ops` call; `op_times` measures each op's
production sample on every backend that takes it. `bench_formats` measures what moves codes, against copying.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch

from . import backends
from .cache.crossover import device_name
from .dispatch import use
from .matrix import copy_arguments
from .native import kernel, library, missing
from .ops import registry

ROUNDS = 15
SAMPLE_US = 2000.0  # one timing covers at least this much work


@dataclass
class Result:
    """One timed candidate."""

    op: str
    case: str
    dtype: str
    kv_format: str
    backend: str
    rounds: int
    median_us: float
    p20_us: float
    over_plain_us: float | None = None  # dispatch only: the median of paired differences to the plain call
    gbs: float | None = None  # bytes read plus written, each once, in the median time
    of_limit: float | None = None  # that rate over the limit's, measured in the same rounds: the median
    limit: str | None = None
    peers: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As the command prints it with --json."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


def interleaved(candidates: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Microseconds a call, one list entry a round; every round runs all candidates in a new order."""
    loops = {}
    for name, function in candidates.items():
        function()
        start = time.perf_counter()
        function()
        loops[name] = max(1, int(SAMPLE_US * 1e-6 / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            function, count = candidates[name], loops[name]
            start = time.perf_counter()
            for _ in range(count):
                function()
            times[name].append((time.perf_counter() - start) / count * 1e6)
    return times


def in_turn(name: str, calls: Sequence[dict[str, Any]]) -> Callable[[], Any]:
    """An op, resolved; each call takes the next arguments."""
    turn, resolved = cycle(calls), registry[name].resolve(**calls[0])
    return lambda: resolved(**next(turn))


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


def dispatch_overhead(names: Iterable[str] = ("reshape_and_cache", "paged_attention")) -> list[Result]:
    """Automatic choice and a resolved callable against the plain call of the same native kernel."""
    results = []
    for name in names:
        op = registry[name]
        args = dict(op.make_samples("cpu", torch.bfloat16))["decode"]
        if list(missing(op, "cpu")):
            continue
        values = tuple(op.bind((), args).values())
        plain, resolved = kernel(op), op.resolve(**args)
        candidates: dict[str, Callable[..., Any]] = {
            "plain torch.ops call": plain,
            "automatic": op,
            "resolved": resolved,
        }
        with torch.no_grad():
            times = interleaved({case: partial(function, *values) for case, function in candidates.items()})
        base = times["plain torch.ops call"]
        for case, samples in times.items():
            over = statistics.median(a - b for a, b in zip(samples, base, strict=True))
            results.append(result_of(name, f"dispatch: {case}", torch.bfloat16, "cpu", samples, over))
    return results


def op_times(names: Iterable[str], device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[Result]:
    """Each op's production sample on every backend of the device that takes it, the reference among them."""
    results = []
    for name in names:
        op = registry[name]
        samples = dict(op.make_samples(device, dtype))
        args = samples.get("production") or next(iter(samples.values()))
        candidates = {}
        for backend in [*(found.name for found in backends.serving(torch.device(device).type)), backends.REFERENCE]:
            own = copy_arguments(args)
            try:
                with use(backend, ops=name):
                    resolved = op.resolve(**own)
            except RuntimeError:  # refused: `explain` tells why
                continue
            candidates[backend] = partial(resolved, **own)
        with torch.no_grad():
            for backend, times in interleaved(candidates).items():
                results.append(result_of(name, "production sample", dtype, backend, times))
    return results


def machine() -> str:
    """The CPU's name, the number of threads that torch uses, and the kernels' instruction set."""
    return f"{device_name(torch.device('cpu'))}, {library('cpu').isa or 'no'} kernels"


def result_of(
    op: str, case: str, dtype: torch.dtype, backend: str, times: list[float], over: float | None = None
) -> Result:
    """A candidate's times as a result."""
    ordered = sorted(times)
    name = str(dtype).removeprefix("torch.")
    return Result(
        op, case, name, "auto", backend, len(times), statistics.median(times), ordered[len(ordered) // 5], over
    )
