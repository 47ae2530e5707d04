"""Timing that can be trusted on a shared machine: interleaved in shuffled rounds, medians of paired ratios."""

from __future__ import annotations

import contextlib
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from ..dispatch import use
from ..ops import registry
from .limits import Limit

ROUNDS = 15
SAMPLE_US = 2000.0  # one timing covers at least this much work, by the quickest of some first calls
FIRST_CALLS = 8  # the first ones fault in the pages of their results, until the heap has room for every one
SIZING_S = 0.02  # or as many as take so long
WAITED = 0.04  # a timing whose threads waited for a core for more than this share of it is taken again, twice at most


@dataclass(frozen=True)
class Case:
    """Calls of one op, taken in turn so that none finds its rows in a cache, and others that do the same work."""

    op: str
    case: str
    calls: Sequence[dict[str, Any]]
    dtype: torch.dtype = torch.bfloat16
    kv_format: str = "auto"
    moved_bytes: int = 0  # that one call reads and writes, each once
    operations: int = 0  # multiplications and additions of one call
    limit: str = ""  # what bounds it, a name in limits.LIMITS
    peers: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)


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
    gflops: float | None = None  # operations in the median time
    of_limit: float | None = None  # that rate over the limit's, measured in the same rounds: the median
    limit: str | None = None
    peers: list[dict[str, Any]] = field(default_factory=list)  # name, median_us, ratio (our time over theirs), differs

    def to_dict(self) -> dict[str, Any]:
        """As the command prints it with --json."""
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return rounded | {"ratio_to_best_peer": max((peer["ratio"] for peer in self.peers), default=None)}


def interleaved(candidates: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Microseconds a call, one list entry a round; every round runs all candidates in a new order."""
    loops = {name: _calls_of_a_sample(function) for name, function in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(_undisturbed(candidates[name], loops[name]))
    return times


def _calls_of_a_sample(function: Callable[[], Any]) -> int:
    function()
    took: list[float] = []
    while len(took) < FIRST_CALLS and sum(took) < SIZING_S:
        took.append(_seconds(function, 1))
    return max(1, int(SAMPLE_US * 1e-6 / max(min(took), 1e-7)))


def _undisturbed(function: Callable[[], Any], count: int) -> float:
    """Microseconds of one of `count` calls: of up to three timings the one whose threads waited least for a core."""
    best = (float("inf"), 0.0)
    for _ in range(3):
        waited, took = _waited_ns(), _seconds(function, count)
        best = min(best, ((_waited_ns() - waited) * 1e-9 / took, took / count * 1e6))
        if best[0] <= WAITED * torch.get_num_threads():
            break
    return best[1]


def _seconds(function: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return time.perf_counter() - start


def _waited_ns() -> int:
    """How long this process's threads could have run and did not, as Linux counts it; 0 where nobody counts."""
    waited = 0
    with contextlib.suppress(OSError, IndexError, ValueError):  # a thread may end while we look
        for thread in Path("/proc/self/task").iterdir():
            waited += int((thread / "schedstat").read_text().split()[1])
    return waited


def in_turn(function: Callable[..., Any], calls: Sequence[dict[str, Any]]) -> Callable[[], Any]:
    """Each call takes the next arguments."""
    turn = cycle(calls)
    return lambda: function(**next(turn))


def keep_freed_memory() -> None:
    """Have this process's heap keep what is freed, where the C library is glibc.

    Else it depends on what lies beside it on the heap whether a new output of some MiB has pages already or faults
    them in, which can take three times as long as filling it. Without THP_MEM_ALLOC_ENABLE they still fault.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
            mallopt(parameter, value)


def measured(cases: Iterable[Case], rounds: int = ROUNDS) -> Iterator[Result]:
    """Each case on the CPU kernels, its limit and its peers in the same rounds."""
    keep_freed_memory()
    for case in cases:
        with use("cpu"), torch.no_grad():
            candidates = {"op": in_turn(registry[case.op].resolve(**case.calls[0]), case.calls)}
            for name, peer in case.peers.items():
                candidates[name] = partial(lambda peer, turn: peer(next(turn)), peer, cycle(case.calls))
            limit = Limit.of(case.limit) if case.limit else None
            if limit:
                candidates["limit"] = limit.run
            times = interleaved(candidates, rounds)
            differences = _differences(case)
        yield _judged(case, times, limit, differences)


def _differences(case: Case) -> dict[str, float]:
    """How far the peers that give numbers of the same shape are from ours, as a share of the largest."""
    found = {}
    ours = registry[case.op](**case.calls[0])
    ours = ours[0] if isinstance(ours, tuple) else ours
    for name, peer in case.peers.items():
        theirs = peer(case.calls[0])
        if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor) and theirs.is_floating_point():
            rows = ours[: len(theirs)].double()  # ours may end in rows that stand for nothing
            apart = (theirs.double() - rows.view_as(theirs)).abs().max()
            found[name] = float(apart / rows.abs().max())
    return found


def _judged(case: Case, times: dict[str, list[float]], limit: Limit | None, differences: dict[str, float]) -> Result:
    result = result_of(case.op, case.case, case.dtype, "cpu", times["op"])
    result.kv_format = case.kv_format
    if case.moved_bytes:
        result.gbs = case.moved_bytes / result.median_us / 1e3
    if case.operations:
        result.gflops = case.operations / result.median_us / 1e3
    if limit:
        work = case.operations if limit.unit == "GFLOP/s" else case.moved_bytes
        result.limit = limit.name
        result.of_limit = work / limit.work / ratio(times["op"], times["limit"])
    for name in case.peers:
        median = statistics.median(times[name])
        peer = {"name": name, "median_us": round(median, 3), "ratio": round(ratio(times["op"], times[name]), 3)}
        result.peers.append(peer | {"differs": differences.get(name)})
    return result


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of our time over theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def result_of(
    op: str, case: str, dtype: torch.dtype, backend: str, times: list[float], over: float | None = None
) -> Result:
    """A candidate's times as a result."""
    ordered = sorted(times)
    name = str(dtype).removeprefix("torch.")
    return Result(
        op, case, name, "auto", backend, len(times), statistics.median(times), ordered[len(ordered) // 5], over
    )
