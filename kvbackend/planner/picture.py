"""The picture of plans: bytes against context with the memory's line, and bytes per layer. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from ..pictures import need_plot, new_figure, save
from .memory import GIB
from .planning import Plan


def plot(plans: Sequence[Plan], file: str) -> None:
    """Draw plans into a file, whose ending names the kind of picture."""
    need_plot(file)
    first = plans[0]
    longest = first.model.max_context or max(131072, first.context)
    contexts = sorted({max(1, int(longest / 2 ** (step / 4))) for step in range(41)})
    figure = new_figure(11, 4.5)
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
    save(figure, file)
