"""The look of a report: marks, plurals, language, and the width of a text on a terminal."""

from __future__ import annotations

import unicodedata
from typing import Any

from kvbackend.compat.data import load_translations
from kvbackend.compat.text import say, translated

MARKS = {"ok": "✓", "warn": "!", "fail": "✗", "skip": "–", "unknown": "?", "info": "·"}
ASCII_MARKS = {
    "ok": "[ok]",
    "warn": "[! ]",
    "fail": "[X ]",
    "skip": "[- ]",
    "unknown": "[? ]",
    "info": "[. ]",
}
_ASCII = {"✓": "ok", "✗": "X", "–": "-", "·": ".", "→": "->", "…": "...", "×": "x"}


class Words:
    """Translate and draw in one language and one character set."""

    def __init__(self, lang: str = "en", ascii_only: bool = False) -> None:
        self.table: dict[str, str] = load_translations() if lang == "zh" else {}
        self.ascii_only = ascii_only
        self.marks = ASCII_MARKS if ascii_only else MARKS

    def __call__(self, template: Any, **params: Any) -> str:
        """A message in this language; a template is filled with `params` first."""
        text = translated(say(template, **params) if params else template, self.table)
        if self.ascii_only and not self.table:
            text = "".join(_ASCII.get(c, c if ord(c) < 128 else "?") for c in text)
        return text


def cells(text: str) -> int:
    """Columns that a text takes; wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrap(text: str, width: int) -> list[str]:
    """Break a text at blanks, or anywhere in scripts without them, into lines of at most `width` columns.

    A word longer than a line (a path, a command) stays whole, so that it can be copied.
    """
    lines: list[str] = [""]
    for word in _words(text):
        line = lines[-1]
        if line and cells(line) + cells(word.rstrip()) > width:
            lines[-1] = line.rstrip()
            lines.append(word.lstrip())
        else:
            lines[-1] = line + word
    return [line.rstrip() for line in lines]


def _words(text: str) -> list[str]:
    """Pieces between which a line may break: words with their blanks, wide characters one by one."""
    pieces: list[str] = []
    for char in text:
        wide = unicodedata.east_asian_width(char) in "WF"
        if (
            pieces
            and not wide
            and not pieces[-1].endswith(" ")
            and unicodedata.east_asian_width(pieces[-1][-1]) not in "WF"
        ) or (pieces and (char == " " or (unicodedata.category(char) == "Po" and wide))):
            pieces[-1] += char
        else:
            pieces.append(char)
    return pieces


def count(words: Words, number: int, one: str, many: str) -> str:
    """`one` or `many` with the number filled in."""
    return words(one if number == 1 else many, n=number)
