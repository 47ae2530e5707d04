"""Join the documents of several machines: what each op is known to do on each kind of device.

A run is one document of `kvbackend matrix --json`. The merged document keeps the runs, their cells packed, so that it
can be kept in a repository and merged again; what contradicts itself is listed, not resolved.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__, backends
from ..backends import REFERENCE
from ..errors import ArgumentError
from ..ops import registry
from . import documents
from .judge import KEY, STATUSES, Cell, Key

SCHEMA = "kvbackend-matrix-merged/1"
COLUMNS = {"cpu": "CPU", "cuda": "CUDA", "npu": "Ascend"}  # device type -> heading of the support table
BEGIN, END = "<!-- support table: kvbackend matrix merge --readme -->", "<!-- end of the support table -->"
HEAD = ("date", "version", "commit", "versions", "devices", "chips", "quick")  # what is kept of a document


class Run(NamedTuple):
    """One document: who ran it, and what came of each cell, whose device is a type: (status, reasons)."""

    head: dict[str, Any]
    cells: dict[Key, tuple[str, tuple[str, ...]]]

    def line(self, number: int) -> str:
        """Who ran it, in one line; see `documents.line`."""
        return documents.line({**self.head, "summary": self._summary()}, number)

    def document(self) -> dict[str, Any]:
        """As the page shows it: what is not kept of a cell, its error and evidence, is empty."""
        cells = [
            Cell(**asdict(key), status=status, reasons=reasons).to_dict()
            for key, (status, reasons) in self.cells.items()
        ]
        return {**self.head, "cells": cells, "summary": self._summary()}

    def _summary(self) -> dict[str, int]:
        statuses = [status for status, _ in self.cells.values()]
        return {status: statuses.count(status) for status in STATUSES}


class Conflict(NamedTuple):
    """A cell that passed in some runs and failed or crashed in others: their numbers. Its device is a type."""

    key: Key
    passed: list[int]
    failed: list[int]

    def __str__(self) -> str:
        key = self.key
        where = f"{key.op} on {key.backend}, {key.device}, {key.dtype}, {key.format}, {key.sample!r}"
        return f"{where}: passed in {marks(self.passed)}, failed in {marks(self.failed)}"


# ------------------------------------------------------------------------------------------------------- reading


def read(path: str) -> list[Run]:
    """The runs in a file: one document of `matrix --json`, or what merge wrote."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair could not be printed
    except (OSError, ValueError, RecursionError) as error:  # those of Unicode and JSON are ValueErrors
        raise ArgumentError(
            f"{path} cannot be read ({error}); it must be what `kvbackend matrix --json` wrote: name such a file"
        ) from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema not in (documents.SCHEMA, SCHEMA):
        raise ArgumentError(
            f"{path} has schema {schema!r}; {documents.SCHEMA} and {SCHEMA} can be merged: name what "
            f"`kvbackend matrix --json` wrote"
        )
    if found.get("fake"):
        raise ArgumentError(
            f"{path} was made over a fake of the device; only what a device did is evidence: run it on one"
        )
    try:
        return [_unpack(run) for run in found["runs"]] if schema == SCHEMA else [_run(found)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ArgumentError(
            f"{path} is not whole ({type(error).__name__}: {error}); it must be as `kvbackend matrix --json` wrote it: "
            f"run that again"
        ) from error


def _run(document: Mapping[str, Any]) -> Run:
    """The cells that ran: those of the document's own devices."""
    devices = set(document["chips"])
    cells = {}
    for cell in document["cells"]:
        key = _key(**{name: cell[name] for name in KEY} | {"device": cell["device"].partition(":")[0]})
        if key.device in devices:
            cells[key] = _verdict(cell["status"], cell["reasons"])
    return Run(_head(document), cells)


def _head(document: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a document. Raises ValueError for what `documents.origin` never writes."""
    head = {name: document[name] for name in HEAD}
    chips = head["chips"]
    fits = dict(
        date=_texts(head["date"]),
        version=_texts(head["version"]),
        commit=head["commit"] is None or _texts(head["commit"]),
        versions=isinstance(head["versions"], dict) and _texts(*head["versions"].values()),
        devices=isinstance(head["devices"], list) and _texts(*head["devices"]),
        chips=isinstance(chips, dict)
        and all(isinstance(chip, dict) and _texts(chip.get("name"), chip.get("arch")) for chip in chips.values()),
        quick=isinstance(head["quick"], bool),
    )
    if wrong := [name for name in HEAD if not fits[name]]:
        raise ValueError(f"{wrong[0]} is {head[wrong[0]]!r}")
    return head


def _texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _key(**names: str) -> Key:
    """The names of ops and backends are shown in Markdown: they must be such."""
    if not _texts(*names.values()):
        raise ValueError(f"a cell is of {names}")
    for name in (names["op"], names["backend"]):
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{name!r} is no name of an op or a backend")
    return Key(**names)


def _verdict(status: str, reasons: list[str]) -> tuple[str, tuple[str, ...]]:
    if status not in STATUSES:
        raise ValueError(f"a cell's status is {status!r}")
    if not isinstance(reasons, list) or not _texts(*reasons):
        raise ValueError(f"a cell's reasons are {reasons!r}")
    return status, tuple(reasons)


def pack(run: Run) -> dict[str, Any]:
    """The run for JSON: cells of one verdict together, samples that all dtypes share said once."""
    dtypes: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for key, verdict in run.cells.items():
        head = key.op, key.backend, key.device, *verdict
        dtypes[head, key.format, key.sample].append(key.dtype)
    groups: dict[tuple[Any, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (head, kv_format, sample), found in dtypes.items():
        group = *head, tuple(found)
        groups[group][kv_format].append(sample)
    names = ("op", "backend", "device", "status", "reasons", "dtypes")
    packed = [dict(zip(names, head, strict=True), samples=samples) for head, samples in groups.items()]
    return {**run.head, "groups": packed}


def _unpack(packed: Mapping[str, Any]) -> Run:
    cells = {
        _key(**{name: group[name] for name in KEY[:3]}, dtype=dtype, format=kv_format, sample=sample): _verdict(
            group["status"], group["reasons"]
        )
        for group in packed["groups"]
        for dtype in group["dtypes"]
        for kv_format, samples in group["samples"].items()
        for sample in samples
    }
    return Run(_head(packed), cells)


# ------------------------------------------------------------------------------------------------------- merging


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Oldest first; a run that is there twice, in a document and in a merged one, counts once."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda run: run.head["date"]):
        if run not in found:
            found.append(run)
    return found


def conflicts(runs: Sequence[Run]) -> list[Conflict]:
    """The cells on which runs disagree."""
    verdicts: dict[Key, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for number, run in enumerate(runs, 1):
        for key, (status, _) in run.cells.items():
            if status in ("pass", "fail", "crashed"):
                verdicts[key][status != "pass"].append(number)
    return [Conflict(key, passed, failed) for key, (passed, failed) in verdicts.items() if passed and failed]


def document(runs: Sequence[Run]) -> dict[str, Any]:
    """The merged document."""
    found = [
        {**asdict(conflict.key), "passed": conflict.passed, "failed": conflict.failed} for conflict in conflicts(runs)
    ]
    return {"schema": SCHEMA, "version": __version__, "runs": [pack(run) for run in runs], "conflicts": found}


def remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader of the table must know: contradictions, and runs of different versions of kvbackend."""
    found = [f"Conflict: {conflict}" for conflict in conflicts(runs)]
    versions = dict.fromkeys(run.head["version"] for run in runs)
    if len(versions) > 1:
        found.append(f"The runs are of different versions of kvbackend: {', '.join(versions)}")
    return found


# ----------------------------------------------------------------------------------------------- the support table


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Of the support table: an op, and what is known of it on each kind of device."""
    return [(op, *(known(op, kind, runs) for kind in COLUMNS)) for op in registry]


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row for the ops that are known alike, then a line for each run, then remarks."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for op, *cells in rows(runs):
        alike[tuple(cells)].append(f"`{op}`")
    lines = [f"| op | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {', '.join(ops)} | {' | '.join(cells)} |" for cells, ops in alike.items()]
    notes = [run.line(number) for number, run in enumerate(runs, 1)] + remarks(runs)
    return "\n".join(lines) + "\n" + "".join(f"\n- {_plain(note)}" for note in notes) + "\n" * bool(notes)


def known(op: str, kind: str, runs: Sequence[Run]) -> str:
    """What is known of an op on a kind of device: what runs found, else what the backends declare."""
    ran = {key.backend for run in runs for key in run.cells if key.op == op and key.device == kind}
    installed = [b for b in backends.registered().values() if b.device == kind and b.adapter(op)]
    words = {backend.name: backend.evidence_of(op) for backend in installed}
    took = {name: _found(op, name, kind, runs) for name in sorted(ran - {REFERENCE})}
    words.update({name: found for name, found in took.items() if found})  # else it ran nothing
    if not words:
        return "reference" + (f": {_found(op, REFERENCE, kind, runs)}" if REFERENCE in ran else "")
    return "; ".join(words.values() if len(words) == 1 else [f"{name}: {text}" for name, text in words.items()])


def _found(op: str, backend: str, kind: str, runs: Sequence[Run]) -> str:
    """The verdicts on an op's cells in few words, with the numbers of the runs; "" where it refused them all."""
    verdicts: dict[Key, set[str]] = defaultdict(set)
    numbers = []
    for number, run in enumerate(runs, 1):
        found = {k: s for k, (s, _) in run.cells.items() if (k.op, k.backend, k.device) == (op, backend, kind)}
        for key, status in found.items():
            verdicts[key].add(status)
        numbers += [number] * bool(found)
    bad = sum(not found.isdisjoint({"fail", "crashed"}) for found in verdicts.values())
    passed = sum("pass" in found for found in verdicts.values())
    refused = sum(found == {"refused"} for found in verdicts.values())
    if refused == len(verdicts):
        return ""
    words = [f"**{bad} of {len(verdicts)} fail**"] * bool(bad)
    words += ["pass" if passed == len(verdicts) and not bad else f"{passed} of {len(verdicts)} pass"]
    words += [f"{refused} refused"] * bool(refused)
    return f"{', '.join(words)} {marks(numbers)}"


def marks(numbers: Iterable[int]) -> str:
    """The numbers of runs: [1, 2], since [1][2] is a link in Markdown."""
    return f"[{', '.join(map(str, numbers))}]"


def _plain(text: str) -> str:
    """A line that is no markup: what comes from files could be any."""
    return "".join("\\" + sign if sign in "\\`*_<>|" else sign for sign in " ".join(text.split()))


def into(path: str, runs: Sequence[Run]) -> str:
    """The text of a Markdown file, with the table between its markers."""
    try:
        before, begin, rest = Path(path).read_text(encoding="utf-8").partition(BEGIN)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read ({error}); --readme takes a Markdown file: name one") from error
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ArgumentError(
            f"{path} lacks {BEGIN} or, after it, {END}; the table is written between these two lines: add them"
        )
    return f"{before}{BEGIN}\n\n{table(runs)}\n{END}{after}"
