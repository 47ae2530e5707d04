"""One page for a browser: every cell with its reasons, filtered in the page; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from . import documents
from .judge import KEY, STATUSES

COLUMNS = ("run", "verdict", *KEY, "max_error", "reasons", "evidence")
# so that no text of a cell can end the script element, or a line of it
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The page of some documents of `kvbackend matrix --json`."""
    rows = [
        [number, cell["status"], *(cell[name] for name in COLUMNS[2:])]
        for number, document in enumerate(found, 1)
        for cell in document["cells"]
    ]
    data = dict(
        columns=COLUMNS,
        verdicts=STATUSES,
        runs=[documents.line(document, number) for number, document in enumerate(found, 1)],
        cells=rows,
    )
    template = pkgutil.get_data(__package__, "page.html")
    assert template is not None
    return template.decode().replace("@DATA@", json.dumps(data, ensure_ascii=False).translate(_ESCAPES))
