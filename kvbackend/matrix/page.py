"""One page for a browser: every cell with its reasons, filtered in the page; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from .judge import STATUSES

COLUMNS = (
    "run", "verdict", "op", "backend", "device", "dtype", "format", "sample", "max_error", "reasons", "evidence",
)  # fmt: skip
# so that no text of a cell can end the script element, or a line of it
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def page(documents: Sequence[Mapping[str, Any]]) -> str:
    """The page of some documents of `kvbackend matrix --json`."""
    rows = [
        [number, cell["status"], *(cell[name] for name in COLUMNS[2:])]
        for number, document in enumerate(documents, 1)
        for cell in document["cells"]
    ]
    data = dict(
        columns=COLUMNS,
        verdicts=STATUSES,
        runs=[line(document, number) for number, document in enumerate(documents, 1)],
        cells=rows,
    )
    template = pkgutil.get_data(__package__, "page.html")
    assert template is not None
    return template.decode().replace("@DATA@", json.dumps(data, ensure_ascii=False).translate(_ESCAPES))


def line(document: Mapping[str, Any], number: int) -> str:
    """A run in one line: `[1] cpu: AMD EPYC; torch 2.13.0, ...; kvbackend 0.1.0 (37c5525); 2026-11-29: 12 pass`."""
    chips = "; ".join(f"{kind}: {chip['name']}, {chip['arch']}" for kind, chip in document["chips"].items())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    commit = f" ({document['commit']})" if document.get("commit") else ""
    counts = ", ".join(f"{count} {status}" for status, count in document["summary"].items() if count)
    quick = ", --quick" if document.get("quick") else ""
    date = document["date"][:10]
    return f"[{number}] {chips}; {versions}; kvbackend {document['version']}{commit}; {date}{quick}: {counts}"
