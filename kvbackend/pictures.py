"""Pictures that commands draw: refused before the measuring where they could not be written, not after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ArgumentError
from .profile import need_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def need_plot(path: str) -> None:
    """Raise ArgumentError where no picture could be written: it is told before the measuring, not after."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            f"--plot needs matplotlib, which cannot be imported ({error}); it draws the picture: run pip install "
            f"matplotlib, or leave --plot out"
        ) from error
    target, known = Path(path), Figure().canvas.get_supported_filetypes()
    if not target.parent.is_dir() or target.suffix.removeprefix(".") not in known:
        raise ArgumentError(
            f"--plot is {path!r}; it must be a .png, .svg or .pdf file in a folder that exists: name such a file"
        )
    need_place(path)


def new_figure(width: float, height: float) -> Figure:
    """An empty picture, inches wide and high; no display is needed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str) -> None:
    """Write a picture to a file whose ending says the kind."""
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ArgumentError(f"--plot is {path!r}, which cannot be written ({error}): name another file") from error
