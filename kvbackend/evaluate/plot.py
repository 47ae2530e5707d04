"""Bytes against perplexity, the best trade-offs joined by a line."""

from __future__ import annotations

from typing import Any

from ..pictures import new_figure, save


def plot(document: dict[str, Any], path: str) -> None:
    """Draw an eval document to a file whose ending says the kind of picture."""
    base, schemes = document["baseline"], document["schemes"]
    figure = new_figure(8.0, 5.0)
    axes = figure.subplots()

    def share(entry: dict[str, Any]) -> float:
        return 100 * float(entry["cache_bytes"]) / float(entry["cache_bytes_fp16"])

    best = sorted((entry for entry in schemes if entry["pareto"]), key=share)
    axes.plot(
        [share(e) for e in best], [e["perplexity"] for e in best], color="tab:blue", lw=1, label="best trade-offs"
    )
    for entries in _places(schemes):
        color = "tab:blue" if any(entry["pareto"] for entry in entries) else "tab:gray"
        axes.plot(share(entries[0]), entries[0]["perplexity"], "o", ms=5, color=color)
        names = ", ".join(entry["name"] for entry in entries)
        left = share(entries[0]) > 55  # long names stay inside
        axes.annotate(
            names, (share(entries[0]), entries[0]["perplexity"]), xytext=(-5 if left else 5, 4), fontsize=7,
            textcoords="offset points", ha="right" if left else "left",
        )  # fmt: skip
    axes.axhline(base["perplexity"], color="black", lw=0.8, ls="--", label=f"full precision, {base['perplexity']:.2f}")
    axes.set_xlabel("cache bytes, percent of fp16")
    axes.set_ylabel("perplexity")
    axes.set_xlim(left=0)
    if schemes and max(e["perplexity"] for e in schemes) > 1.5 * base["perplexity"]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    configuration = document["configuration"]
    axes.set_title(
        f"{document['model']}, {document['text_tokens']} tokens of {configuration['text']} after "
        f"{', '.join(map(str, configuration['contexts']))}",
        fontsize=9,
    )
    axes.legend(fontsize=8)
    save(figure, path)


def _places(schemes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Schemes that are drawn at the same point, together."""
    found: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for entry in schemes:
        place = round(100 * entry["cache_bytes"] / entry["cache_bytes_fp16"]), round(entry["perplexity"], 2)
        found.setdefault(place, []).append(entry)
    return list(found.values())
