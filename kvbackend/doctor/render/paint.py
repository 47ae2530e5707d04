"""Put lines on a terminal: with rich where it is installed, with escape codes where not, plain everywhere else."""

from __future__ import annotations

import os
import shutil
import sys
from typing import IO

from kvbackend.doctor.render.screen import Line

_CODES = {"green": "32", "yellow": "33", "red": "31", "cyan": "36", "dim": "2", "bold": "1"}


def use_color(mode: str, stream: IO[str]) -> bool:
    """Whether to colour: as asked, else on a terminal that does not forbid it."""
    if mode != "auto":
        return mode == "always"
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def width(stream: IO[str]) -> int:
    """Columns to fill: the terminal's, between 60 and 120; 100 elsewhere."""
    if not stream.isatty():
        return 100
    return min(120, max(60, shutil.get_terminal_size().columns))


def paint(lines: list[Line], color: bool, stream: IO[str]) -> None:
    """Print lines."""
    if color:
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            text = "\n".join("".join(_escape(t, s) for t, s in line) for line in lines)
        else:
            console = Console(file=stream, force_terminal=True, highlight=False, soft_wrap=True, legacy_windows=False)
            for line in lines:
                console.print(Text.assemble(*line))
            return
    else:
        text = "\n".join("".join(t for t, _ in line).rstrip() for line in lines)
    write(text + "\n", stream)


def write(text: str, stream: IO[str]) -> None:
    """Print text whatever the stream's encoding can carry."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def _escape(text: str, style: str) -> str:
    codes = ";".join(_CODES[word] for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text.strip() else text


def fits_unicode(stream: IO[str]) -> bool:
    """Whether the marks can be printed."""
    try:
        "✓✗–·".encode(getattr(stream, "encoding", None) or sys.getdefaultencoding())
    except (UnicodeEncodeError, LookupError):
        return False
    return True
