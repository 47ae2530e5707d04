"""What commands share: one JSON document on stdout, or a table; progress and remarks on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import __version__
from ..errors import ArgumentError


def need_device(name: str) -> None:
    """ArgumentError unless torch can put tensors on that device here ("meta" holds shapes alone, which is enough)."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch's ways of saying that there is no such device
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"--device is {name!r}; torch cannot use it here ({reason}): pass cpu") from error


def print_json(command: str, document: dict[str, Any]) -> None:
    """The one document of `--json`, with its schema and version in front."""
    head = {"schema": f"kvbackend-{command}/1", "version": __version__}
    json.dump(head | document, sys.stdout, indent=1, ensure_ascii=False)
    print()


@contextmanager
def bar() -> Iterator[Any]:
    """`step(what, done, total, now="")`: a bar for each `what` on stderr where that is a terminal, else nothing."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda what, done, total, now="": None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total, now="": None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        tasks: dict[str, Any] = {}

        def step(what: str, done: int, total: int, now: str = "") -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total, description=f"{what} {now}".strip())

        yield step


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """A table: with rich where it is installed, else in plain columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(len(row[i]) for row in [list(columns), *texts]) for i in range(len(columns))]
        for row in [list(columns), *texts]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*columns, title=title, title_justify="left")
    for row in texts:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:  # a pipe has no width: do not cut cells
        console = Console(width=200)
    console.print(table)
