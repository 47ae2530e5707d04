"""Timing that can be trusted on a shared machine: interleaved in shuffled rounds, medians of paired ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any

import torch

from ..ops import registry

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


def result_of(
    op: str, case: str, dtype: torch.dtype, backend: str, times: list[float], over: float | None = None
) -> Result:
    """A candidate's times as a result."""
    ordered = sorted(times)
    name = str(dtype).removeprefix("torch.")
    return Result(
        op, case, name, "auto", backend, len(times), statistics.median(times), ordered[len(ordered) // 5], over
    )
