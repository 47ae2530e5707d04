"""How decode attention grows with the context, with the number of sequences, and with threads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ..dispatch import use
from ..native import missing
from ..ops import registry
from ..ops._samples import Maker
from ..pictures import new_figure, save
from . import attention
from .timing import ROUNDS, Case, in_turn, interleaved

CONTEXTS = tuple(1024 << step for step in range(8))  # to 128k
SEQUENCES = (1, 2, 4, 8, 16, 32)
CONTEXT = 4096  # of each of several sequences
THREADS_CONTEXT = 8192

OPS = ("paged_attention", "mla_attention")


@dataclass(frozen=True)
class Point:
    """One size of a curve."""

    op: str
    curve: str  # "context" of one sequence, "sequences", "threads"
    at: int
    median_us: float
    tokens: int  # read by a call

    def to_dict(self) -> dict[str, Any]:
        """As the command prints it with --json."""
        return asdict(self) | {"median_us": round(self.median_us, 3)}


def curves(names: Iterable[str]) -> Iterator[Point]:
    """The points of these ops' curves on the CPU kernels; those of one curve are timed in the same rounds."""
    for name in names:
        if name not in OPS or list(missing(registry[name], "cpu")):
            continue
        case = _paged() if name == "paged_attention" else _latent()
        sizes = {
            "context": {n: (1, n) for n in CONTEXTS},
            "sequences": {n: (n, CONTEXT) for n in SEQUENCES},
            "threads": dict.fromkeys(range(1, torch.get_num_threads() + 1), (1, THREADS_CONTEXT)),
        }
        for curve, points in sizes.items():
            with use("cpu"), torch.no_grad():
                runs = {str(at): _run(case(*size), at if curve == "threads" else None) for at, size in points.items()}
                times = interleaved(runs, ROUNDS)
            for at, (sequences, context) in points.items():
                yield Point(name, curve, at, statistics.median(times[str(at)]), sequences * context)


def _paged() -> Callable[[int, int], Case]:
    make = Maker(torch.device("cpu"), torch.bfloat16)
    pools = attention.Pools(16, torch.bfloat16)
    return lambda sequences, context: attention.decode(make, pools, sequences, context, others=False)


def _latent() -> Callable[[int, int], Case]:
    make, pages = Maker(torch.device("cpu"), torch.bfloat16), attention.latent_pages()
    return lambda sequences, context: attention.decode_mla(make, pages, 16, sequences, context, others=False)


def _run(case: Case, threads: int | None) -> Callable[[], Any]:
    call = in_turn(registry[case.op].resolve(**case.calls[0]), case.calls)
    return call if threads is None else partial(_with_threads, threads, call)


def _with_threads(threads: int, call: Callable[[], Any]) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def plot(points: list[Point], path: str, machine: str) -> None:
    """Draw a row of curves for each op: time of a token by context and by sequences, and the speed of more threads."""
    ops = list(dict.fromkeys(point.op for point in points))
    figure = new_figure(10, 3 * len(ops))
    rows = figure.subplots(len(ops), 3, squeeze=False)
    for axes, op in zip(rows, ops, strict=True):
        for axis, curve in zip(axes, ("context", "sequences", "threads"), strict=True):
            own = [point for point in points if (point.op, point.curve) == (op, curve)]
            at = [point.at for point in own]
            if curve == "threads":
                axis.plot(at, [own[0].median_us / point.median_us for point in own], "o-")
                axis.plot(at, at, ":", color="gray")
                axis.set(ylabel="times one thread", xlabel=f"threads, 1 x {THREADS_CONTEXT}", xticks=at)
            else:
                axis.plot(at, [1e3 * point.median_us / point.tokens for point in own], "o-")
                axis.set_xscale("log", base=2)
                what = "context, 1 sequence" if curve == "context" else f"sequences of {CONTEXT}"
                axis.set(ylabel="ns a token", xlabel=what, ylim=(0, None))
        axes[0].set_title(op, loc="left", fontsize=9)
    figure.suptitle(f"decode, bfloat16, {machine}", fontsize=9)
    save(figure, path)
