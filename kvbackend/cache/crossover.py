"""From which context on sparse attention is faster than dense here: measured once, kept in a file, asked by "auto".

`kvbackend bench --crossover` measures; the file is `kvbackend/crossover.json` in the user's cache folder
(XDG_CACHE_HOME, else ~/.cache). Nothing is measured behind a caller's back: a model's output must not depend on timing.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..profile import write_whole
from .layers import GqaLayer
from .paged import PagedCache
from .sparse import SparseAttention, Sparsity
from .stages import now

SCHEMA = "kvbackend-crossover/2"
CONTEXTS = tuple(1 << power for power in range(10, 17))
ROUNDS = 9
UNMEASURED = 8  # without a measurement: so many times the tokens that a query reads
BEYOND = 2  # where sparse attention was not faster: so many times the largest context measured


@dataclass(frozen=True)
class Case:
    """What a crossover holds for: a device, the shape of a layer, and a choice."""

    device: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_format: str
    topk: int
    sinks: int
    recent: int
    page_size: int
    candidates: int
    reselect: int
    summaries: bool

    @classmethod
    def of(cls, cache: PagedCache, layer: int, heads: int, sparsity: Sparsity) -> Case:
        """The case of one layer of a cache."""
        spec = cache.specs[layer]
        assert isinstance(spec, GqaLayer)
        topk = sparsity.of_layer(layer, len(cache.specs))
        return cls(
            device_name(cache.device),
            heads,
            spec.kv_heads,
            spec.head_dim,
            str(cache.dtype).removeprefix("torch."),
            cache.kv_formats[layer],
            **asdict(replace(sparsity, topk=topk)),
        )


@dataclass(frozen=True)
class Row:
    """One context: microseconds of a decode step of one sequence in one layer, and those of each stage of it."""

    context: int
    dense_us: float
    sparse_us: float
    stages_us: dict[str, float]


def device_name(device: torch.device) -> str:
    """The name of the chip; of a CPU, with the number of threads that torch uses."""
    if device.type == "cpu":
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if device.type == "meta":
        return "meta"  # shapes alone, on no chip
    return str(torch.get_device_module(device).get_device_name(device))


def measure(
    layer: GqaLayer,
    heads: int,
    sparsity: Sparsity,
    dtype: torch.dtype = torch.bfloat16,
    kv_format: str = "auto",
    contexts: Iterable[int] = CONTEXTS,
    device: str = "cpu",
) -> tuple[Case, list[Row]]:
    """Time dense and sparse decode steps beside each other, in alternating order, at each context.

    A sparse step is the mean over `sparsity.reselect` of them, one of which chooses.
    """
    contexts, block_size = sorted(contexts), 16
    if heads % layer.kv_heads:
        raise ArgumentError(
            f"heads is {heads} with {layer.kv_heads} kv heads; the first must be a multiple of the second: pass the "
            f"shape of one layer"
        )
    blocks = -(-(contexts[-1] + 2 * ROUNDS + 3) // block_size)
    cache = PagedCache([layer], blocks, block_size, dtype, device, kv_format=kv_format)
    sparse = SparseAttention(cache, sparsity, timed=True)
    case = Case.of(cache, 0, heads, sparsity)
    make = torch.Generator(device).manual_seed(0)

    def rows(count: int, num_heads: int, dim: int) -> Tensor:
        return torch.randn(count, num_heads, dim, generator=make, device=device).to(dtype)

    found = []
    share = 1 / sparsity.reselect if sparsity.reselect else 0.0  # of the steps choose
    for context in contexts:
        seq = cache.new_sequence()
        key, value = (rows(context, layer.kv_heads, width) for width in (layer.head_dim, layer.value_width))
        sparse.write(0, [seq], [context], cache.append(seq, context), key, value)
        q, key, value = rows(1, heads, layer.head_dim), key[:1], value[:1]

        def dense_step(slots: Tensor, seq: int = seq, q: Tensor = q, key: Tensor = key, value: Tensor = value) -> None:
            cache.layers[0].write(slots, key, value)
            cache.attend(0, q, [seq], [1], layer.head_dim**-0.5)

        def sparse_step(slots: Tensor, seq: int = seq, q: Tensor = q, key: Tensor = key, value: Tensor = value) -> None:
            sparse.write(0, [seq], [1], slots, key, value)
            sparse.attend(0, q, [seq], [1], layer.head_dim**-0.5)

        dense, choosing, keeping = list[dict[str, float]](), list[dict[str, float]](), list[dict[str, float]]()
        for number in range(ROUNDS + 1):  # the first warms up
            sparse.choose_again(seq)
            for which in ("dense", "sparse") if number % 2 else ("sparse", "dense"):
                if which == "dense":
                    dense.append(_timed(dense_step, cache.append(seq, 1), sparse))
                    cache.truncate(seq, cache.length(seq) - 1)
                else:
                    choosing.append(_timed(sparse_step, cache.append(seq, 1), sparse))
                    keeping.append(choosing[-1] if share == 1 else _timed(sparse_step, cache.append(seq, 1), sparse))
        first, later = _medians(choosing), _medians(keeping)
        step = {name: share * first[name] + (1 - share) * later[name] for name in first}
        found.append(Row(context, _medians(dense)["step"], step.pop("step"), step))
        cache.free(seq)
        sparse.forget(seq)
    return case, found


def _timed(step: Callable[[Tensor], None], slots: Tensor, sparse: SparseAttention) -> dict[str, float]:
    """Microseconds of a step that writes to these slots, and of each stage of it."""
    sparse.stages.clear()
    start = now(sparse.cache.device)
    step(slots)
    spent = {"step": now(sparse.cache.device) - start, **sparse.seconds}
    return {name: seconds * 1e6 for name, seconds in spent.items()}


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each, the first step left out."""
    return {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]}


def crossover(rows: Iterable[Row]) -> int | None:
    """The first context from which on sparse was faster at every context measured; None if there is none."""
    first = None
    for row in sorted(rows, key=lambda row: -row.context):
        if row.sparse_us >= row.dense_us:
            break
        first = row.context
    return first


# ------------------------------------------------------------------------------------------------------ what is kept


def path() -> Path:
    """Where measurements are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvbackend" / "crossover.json"


def save(case: Case, rows: Iterable[Row]) -> None:
    """Keep a measurement, in place of an older one of the same case; whole or not at all."""
    entries = [entry for entry in _entries() if entry["case"] != asdict(case)]
    rows = list(rows)
    figures = {"tokens": crossover(rows), "rows": [asdict(row) for row in rows], "date": str(date.today())}
    entries.append({"case": asdict(case), **figures})
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps({"schema": SCHEMA, "entries": entries}, indent=1).encode())


def dense_below(case: Case) -> tuple[int, str]:
    """Tokens below which a case is faster dense, and how that is known, in words."""
    read = case.topk + case.sinks + case.recent
    unmeasured = UNMEASURED * read
    for entry in _entries():
        if entry["case"] == asdict(case):
            measured = f"measured on {entry['date']} on {case.device}"
            if (tokens := entry["tokens"]) is not None:
                return tokens, f"sparse attention is faster from {tokens} tokens on, {measured}"
            largest = max(row["context"] for row in entry["rows"])
            return max(BEYOND * largest, unmeasured), (
                f"sparse attention is not faster up to {largest} tokens, {measured}; beyond that not measured: run "
                f"kvbackend bench --crossover with longer --contexts"
            )
    return unmeasured, (
        f"not measured on this device: {UNMEASURED} times the {read} tokens that a query reads; run kvbackend bench "
        f"--crossover to measure"
    )


def _entries() -> list[dict[str, Any]]:
    try:
        document = json.loads(path().read_text())
    except (OSError, ValueError):  # none yet, or not whole: it is only a measurement
        return []
    return document["entries"] if isinstance(document, dict) and document.get("schema") == SCHEMA else []
