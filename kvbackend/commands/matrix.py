"""`kvbackend matrix`: every op on every backend here, each sample compared with the reference; `matrix merge`."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .. import profile
from ..errors import ArgumentError
from ._output import bar, need_device, print_json, print_table

if TYPE_CHECKING:
    from ..matrix import Cell
    from ..matrix.judge import Key

MERGE = "merge"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.usage = (
        "kvbackend matrix [OP ...] [--quick] [--backend B] [--device D] [--json] [--html FILE]\n"
        "       kvbackend matrix merge FILE ... [--markdown | --json] [--readme FILE] [--html FILE] [--wanted [FILE]]"
    )
    parser.add_argument("ops", metavar="OP", nargs="*", help="ops to run (default: all); or: merge FILE ...")
    parser.add_argument("--quick", action="store_true", help="the first sample of each format, and production's")
    parser.add_argument("--backend", action="append", help="only this backend; repeatable")
    parser.add_argument("--device", action="append", help="only this device; repeatable (default: all that are here)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, a cell for each sample")
    parser.add_argument("--html", metavar="FILE", help="also write one page for a browser, with filters")
    merging = parser.add_argument_group("merge: what documents of --json, of several machines, say together")
    merging.add_argument("--markdown", action="store_true", help="print the support table as Markdown")
    merging.add_argument("--readme", metavar="FILE", help="write the support table between a Markdown file's markers")
    merging.add_argument(
        "--wanted", metavar="FILE", nargs="?", const="ci/matrix.toml",
        help="show which wanted combinations are covered (default: ci/matrix.toml)",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the samples, or merge. Exit code 1 where a cell failed or crashed."""
    if args.ops[:1] == [MERGE]:
        return merge(args)
    for option in ("markdown", "readme", "wanted"):
        if getattr(args, option) not in (None, False):
            raise ArgumentError(
                f"--{option} is given without merge; it shows documents that --json wrote: "
                f"run kvbackend matrix merge FILE ... --{option}"
            )
    from ..backends import names
    from ..matrix import documents, page, summarize
    from ..ops import get, registry

    chosen = [get(name).name for name in args.ops] or list(registry)
    for backend in args.backend or ():
        if backend not in names():
            raise ArgumentError(f"--backend is {backend!r}; installed are {', '.join(names())}: choose one of these")
    devices = devices_of(args.device)
    if args.html is not None:
        profile.need_place(args.html)
    found = run(chosen, args.backend, devices, args.quick, asking=not args.device)
    document = documents.document(found, devices, args.quick)
    if args.html:
        profile.write_whole(args.html, page.page([document]).encode())
    if args.json:
        print_json("matrix", document)
    else:
        print_cells(found, devices)
        print(", ".join(f"{count} {status}" for status, count in summarize(found).items() if count))
    return int(any(cell.status in ("fail", "crashed") for cell in found))


def devices_of(given: Sequence[str] | None) -> list[str]:
    """The devices that were asked for, or all here that some backend serves."""
    from ..backends import registered

    # asked first: a backend loads what makes its devices known to torch
    here = {backend.device for backend in registered().values() if not backend.missing() and backend.device}
    for name in given or ():
        need_device(name)
        if name == "meta":
            raise ArgumentError("--device is 'meta', which holds no numbers; samples are run and compared: pass cpu")
    return list(dict.fromkeys(given or ["cpu", *sorted(here)]))


def run(
    ops: Sequence[str], backends: Sequence[str] | None, devices: Sequence[str], quick: bool, asking: bool
) -> list[Cell]:
    """All cells. asking: also what backends of devices that are not here say of the samples."""
    from ..matrix import children

    found: list[Cell] = []
    groups = children.groups(ops, backends, devices, quick)
    turns: dict[tuple[str, ...], None] = {}
    with bar() as step:

        def begin(key: Key) -> None:
            turns[key.turn] = None
            step("cells", len(turns) - 1, total, f"{key.op} on {key.backend}")

        total = sum(group.turns() for group in groups)
        for group in groups:
            found += children.run(group, begin)
        step("cells", total, total)
    found += children.asked(ops, backends, devices, quick) if asking else ()
    return sorted(found, key=lambda cell: ops.index(cell.op))


def print_cells(found: Sequence[Cell], devices: Sequence[str]) -> None:
    """A row for each op and backend; then the reasons of cells that had a device, and why backends have none."""
    from ..backends import registered

    rows: dict[tuple[str, ...], dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    several = len({cell.device for cell in found if cell.device in devices}) > 1
    for cell in found:
        where = f"{cell.backend} on {cell.device}" if several and cell.device in devices else cell.backend
        rows[cell.op, where][cell.dtype].append(cell)
    dtypes = list(dict.fromkeys(cell.dtype for cell in found if cell.sample))
    table = [(*head, *(verdict(by_dtype[dtype]) for dtype in dtypes)) for head, by_dtype in rows.items()]
    print_table(("op", "backend", *dtypes), table)
    here = [cell for cell in found if cell.device in devices]
    for line in sorted({f"{c.op} on {c.backend}, {c.status}: {r}" for c in here for r in c.reasons}):
        print(line)
    elsewhere = {cell.backend for cell in found} - {cell.backend for cell in here}
    for backend in registered().values():
        if backend.name in elsewhere:
            for reason in backend.missing():
                print(f"{backend.name}: untested: {reason}")


def verdict(group: Sequence[Cell]) -> str:
    """The cells of one op, backend and dtype in a few words."""
    by_status: dict[str, list[Cell]] = defaultdict(list)
    for cell in group:
        by_status[cell.status].append(cell)
    words = [
        f"{status.upper()} {len(by_status[status])} of {len(group)}: {by_status[status][0].sample}"
        for status in ("fail", "crashed")
        if by_status[status]
    ]
    if passed := by_status["pass"]:
        worst = max(cell.max_error or 0.0 for cell in passed)
        words.append(f"pass {len(passed)} ({f'error {worst:.1e}' if worst else 'exact'})")
    words += [f"{len(by_status[status])} {status}" for status in ("untested", "refused") if by_status[status]]
    return "refused" if words == [f"{len(group)} refused"] else ", ".join(words)


# ------------------------------------------------------------------------------------------------------- merging


def merge(args: argparse.Namespace) -> int:
    """Join documents and show what they say together."""
    from ..matrix import merge as merging
    from ..matrix import page, wanted

    given = [f"--{name}" for name in ("quick", "backend", "device") if getattr(args, name)]
    if given:
        raise ArgumentError(f"{', '.join(given)} is given with merge, which runs nothing: leave it out")
    for other in ("markdown", "wanted"):
        if args.json and getattr(args, other):
            raise ArgumentError(f"--json and --{other} are given; both print to the same place: give one of the two")
    for option in ("html", "readme", "wanted"):
        if getattr(args, option) == "":
            raise ArgumentError(f"--{option} is ''; it takes a file: name one, or leave it out")
    if not args.ops[1:]:
        raise ArgumentError("merge names no file; it takes what `kvbackend matrix --json` wrote: name one or more")
    rows = wanted.read(args.wanted) if args.wanted else []
    runs = merging.distinct(run for path in args.ops[1:] for run in merging.read(path))
    if args.html:
        profile.need_place(args.html)
    if args.readme:
        profile.write_whole(args.readme, merging.into(args.readme, runs).encode())
    if args.html:
        profile.write_whole(args.html, page.page([run.document() for run in runs]).encode())
    if args.json:
        print_json("matrix", merging.document(runs))
    elif args.markdown:
        print(merging.table(runs), end="")
    else:
        print_table(("op", *merging.COLUMNS.values()), merging.rows(runs))
        for number, run in enumerate(runs, 1):
            print(run.line(number))
        for remark in merging.remarks(runs):
            print(remark)
    if rows:
        shown = [
            (*describe(row), merging.marks(found) if (found := wanted.covering(row, runs)) else "no run")
            for row in rows
        ]
        print_table(("device", "architecture", "versions", "covered by"), shown)
    return int(any(status in ("fail", "crashed") for run in runs for status, _ in run.cells.values()))


def describe(row: Mapping[str, str]) -> tuple[str, str, str]:
    """A wanted combination: device, architecture, versions."""
    versions = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("device", "arch"))
    return row["device"], row["arch"], versions
