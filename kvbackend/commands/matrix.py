"""`kvbackend matrix`: every op on every backend of this machine, each of its samples compared with the reference."""

from __future__ import annotations

import argparse
import platform
import sys
import warnings
from collections import defaultdict
from typing import Any

from ..errors import ArgumentError
from ._output import need_device, print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("ops", metavar="OP", nargs="*", help="ops to run (default: all)")
    parser.add_argument("--backend", action="append", help="only this backend; repeatable")
    parser.add_argument("--device", default="cpu", help="the device to run on (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, a cell for each sample")


def main(args: argparse.Namespace) -> int:
    """Run the samples. Exit code 1 where a cell failed."""
    import torch

    from ..backends import names
    from ..dispatch import FallbackWarning
    from ..matrix import Cell, cells, summarize
    from ..native import build_facts
    from ..ops import get, registry

    chosen = [get(name).name for name in args.ops] or list(registry)
    for backend in args.backend or ():
        if backend not in names():
            raise ArgumentError(f"--backend is {backend!r}; installed are {', '.join(names())}: choose one of these")
    need_device(args.device)
    if args.device == "meta":
        raise ArgumentError("--device is 'meta', which holds no numbers; samples are run and compared: pass cpu")
    warnings.simplefilter("ignore", FallbackWarning)
    found: list[Cell] = []
    for done, op in enumerate(chosen):
        if sys.stderr.isatty():
            print(f"\r{done}/{len(chosen)} {op:<30}", end="", file=sys.stderr)
        found += cells([op], args.backend, args.device)
    if sys.stderr.isatty():
        print("\r" + " " * 50 + "\r", end="", file=sys.stderr)
    summary = summarize(found)
    if args.json:
        host: dict[str, Any] = dict(
            platform=platform.platform(), machine=platform.machine(), python=platform.python_version()
        )
        try:
            host |= build_facts()
        except ImportError as error:
            host["build"] = str(error)
        document: dict[str, Any] = dict(host=host | {"torch": torch.__version__}, devices=[args.device])
        print_json("matrix", document | {"cells": [cell.to_dict() for cell in found], "summary": summary})
    else:
        _print_cells(found)
        print(", ".join(f"{count} {status}" for status, count in summary.items() if count))
    return 1 if summary["fail"] else 0


def _print_cells(found: list[Any]) -> None:
    """A row for each op and backend, then what failed or was refused."""
    rows: dict[tuple[str, str], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for cell in found:
        rows[cell.op, cell.backend][cell.dtype].append(cell)
    dtypes = list(dict.fromkeys(cell.dtype for cell in found))
    table = []
    for (op, backend), by_dtype in rows.items():
        table.append((op, backend, *(_verdict(by_dtype[dtype]) for dtype in dtypes)))
    print_table(("op", "backend", *dtypes), table)
    for line in sorted({f"{c.op} on {c.backend}, {c.status}: {r}" for c in found for r in c.reasons}):
        print(line)


def _verdict(group: list[Any]) -> str:
    passed = [cell for cell in group if cell.status == "pass"]
    failed = [cell for cell in group if cell.status == "fail"]
    if failed:
        return f"FAIL {len(failed)} of {len(group)}: {failed[0].sample}"
    if not passed:
        return "refused"
    worst = max(cell.max_error for cell in passed)
    refused = f", {len(group) - len(passed)} refused" if len(passed) < len(group) else ""
    return f"pass {len(passed)} (error {worst:.1e}){refused}" if worst else f"pass {len(passed)} (exact){refused}"
