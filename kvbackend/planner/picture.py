"""The picture of plans: bytes against context with the memory's line, and bytes per layer. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ArgumentError
from .memory import GIB
from .planning import Plan


def plot(plans: Sequence[Plan], file: str) -> None:
    """Draw plans into a file, whose ending names the kind of picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"--plot is {file!r} and matplotlib is not installed; plots need it: pip install matplotlib"
        ) from error
    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if Path(file).suffix[1:] not in kinds:
        raise ArgumentError(f"--plot is {file!r}; its ending must be one of {', '.join(kinds)}: write cache.png")
    if not Path(file).resolve().parent.is_dir():
        raise ArgumentError(f"--plot is {file!r}, in a folder that does not exist: create it or choose another")
    first = plans[0]
    longest = first.model.max_context or max(131072, first.context)
    contexts = sorted({max(1, int(longest / 2 ** (step / 4))) for step in range(41)})
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    lines, bars = figure.subplots(1, 2)
    for made in plans:
        lines.plot(contexts, [made.device_bytes_at(n) / GIB for n in contexts], label=made.scheme.name)
    if first.device is not None:
        left = min(stage.available_bytes for stage in first.stages) / GIB
        lines.axhline(left, color="black", linestyle="--", label=f"{first.device.name}: {left:.1f} GiB for the cache")
    title = f"{first.model.name}, {first.sequences} sequence(s), on one of {first.parallel.devices} device(s)"
    lines.set(xlabel="context (tokens)", ylabel="GiB", xscale="log", yscale="log", title=title)
    lines.legend()
    width = 0.8 / len(plans)
    for at, made in enumerate(plans):
        where = [layer.index + at * width for layer in made.cache.layers]
        bars.bar(where, [float(layer.per_token) for layer in made.cache.layers], width, label=made.scheme.name)
    bars.set(xlabel="layer", ylabel="bytes per token", title="per layer")
    figure.savefig(file)
