"""Two saved documents side by side, if they may be compared at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError

SCHEMA = "kvbackend-eval/1"


def read(path: str) -> dict[str, Any]:
    """A document that `kvbackend eval --json` wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{path} cannot be read ({error}); it must be a document of eval --json: check it"
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ArgumentError(f"{path} is no {SCHEMA} document; compare takes what eval --json wrote: pass such a file")
    return document


def need_same_configuration(paths: Sequence[str], documents: Sequence[dict[str, Any]]) -> None:
    """Raise ArgumentError, naming what differs, unless all documents rest on the same configuration."""
    first = documents[0]["configuration"]
    for path, document in zip(paths[1:], documents[1:], strict=True):
        other = document["configuration"]
        names = [name for name in sorted(first | other) if first.get(name) != other.get(name)]
        if names:
            told = ", ".join(f"{name} {first.get(name)!r} and {other.get(name)!r}" for name in names)
            raise ArgumentError(
                f"{paths[0]} and {path} differ in {told}; figures compare under one configuration only: measure both "
                f"with the same model, text and settings"
            )
