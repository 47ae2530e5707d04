"""Reports on disk: bundles to hand on, baselines to compare with. Written only where the user said."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from typing import Any

from kvbackend.compat.data import DataError
from kvbackend.doctor.facts import STATES

REPORT = "report.json"
_LIMIT = 64 * 1024 * 1024


def _check(text: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON ({error}); a file that --json or --bundle wrote is: give such a file"
        ) from None
    facts = document.get("facts") if isinstance(document, dict) else None
    sound = (
        isinstance(facts, dict)
        and document.get("schema") == "kvbackend-doctor/1"
        and all(isinstance(f, dict) and f.get("state") in STATES for f in facts.values())
        and isinstance(document.get("run"), dict)
    )
    if not sound or document["run"].get("level") not in ("static", "import", "device"):
        raise DataError(
            f"{where} is no report of schema kvbackend-doctor/1; a file that --json or --bundle wrote is: give such "
            "a file"
        )
    return document


def load_report(path: str) -> dict[str, Any]:
    """A report that --json wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            return _check(file.read(_LIMIT), path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); --baseline takes a file that --json wrote: check the path"
        ) from None


def load_bundle(path: str) -> dict[str, Any] | None:
    """The report in an unpacked bundle or a bundle file; None when the path is a tree of another kind."""
    if os.path.isdir(path):
        inside = os.path.join(path, REPORT)
        return load_report(inside) if os.path.isfile(inside) else None
    if not os.path.isfile(path):
        raise DataError(f"{path} is not there; --root takes a folder or a bundle: check the path")
    try:
        with tarfile.open(path, "r:gz") as archive:
            member = archive.extractfile(REPORT)
            text = member.read(_LIMIT).decode("utf-8", "replace") if member else ""
    except (OSError, tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(
            f"{path} is no bundle ({error}); --root takes a folder or a file that --bundle wrote: check the path"
        ) from None
    return _check(text, path)


def write_bundle(path: str, document: dict[str, Any], markdown: str) -> list[str]:
    """Write report, JSON and raw outputs as a tar.gz; returns the names inside."""
    texts = {REPORT: json.dumps(document, indent=1, ensure_ascii=False), "report.md": markdown}
    for key, fact in sorted(document["facts"].items()):
        if fact.get("raw"):
            texts["raw/{}.txt".format(re.sub(r"[^\w.-]", "_", key))] = fact["raw"]
    with tarfile.open(path, "w:gz") as archive:
        for name, text in texts.items():
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return list(texts)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Facts that differ between two reports: key, earlier value, present value."""
    old, new = before["facts"], after["facts"]
    found = []
    for key in sorted(set(old) | set(new)):
        a, b = (_short(facts.get(key)) for facts in (old, new))
        if a != b:
            found.append({"fact": key, "before": a, "after": b})
    return found


def _short(fact: dict[str, Any] | None) -> Any:
    if fact is None:
        return None
    value = fact.get("value") if fact["state"] == "value" else fact["state"]
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if k not in ("seconds",)}
    return None if value == "absent" else value
