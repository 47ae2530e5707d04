"""Climbing to a smaller cache, a rung at a time, as long as a real model loses no more than is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import ArgumentError
from .evaluate import Evaluator, Settings, pareto

MAX_LOSS = 0.02  # of perplexity
FASTER = 1.05  # times the tokens per second that count as more: less is a machine's noise
RANKS = (0.75, 0.5, 0.25)  # of the head dim
TOPK = (512, 256, 128)
FORMATS = ("bf16", "fp8_e4m3", "int8", "fp4_e2m1")
SAMPLE = Settings(contexts=(1024,), rows=2, scored=512, code_context=64, code_scored=16, new_tokens=1)

Told = Callable[[dict[str, Any]], None]  # told every rung when it is measured


@dataclass(frozen=True)
class Choice:
    """What a rung is made of; None and empty: as full precision has it."""

    kv_format: str = "auto"
    rank: str | None = None
    topk: int | None = None
    ratios: str | None = None
    layers: tuple[tuple[str, str], ...] = field(default=())

    @property
    def scheme(self) -> str:
        """As `kvbackend run --kv-format` takes it."""
        parts = [self.kv_format]
        parts += [f"{name}={value}" for name in ("rank", "ratios", "topk") if (value := getattr(self, name))]
        return ",".join([*parts, *(f"{span}={name}" for span, name in self.layers)])


def rungs(head_dim: int | None, num_layers: int) -> Iterator[tuple[str, Callable[[Choice], list[Choice]]]]:
    """The stages in their order, each with what it would make of the choice so far, from mild to strong."""
    if head_dim is not None:
        ranks = sorted({max(1, int(head_dim * share)) for share in RANKS}, reverse=True)
        yield "low rank", lambda so_far: [replace(so_far, rank=str(rank)) for rank in ranks]
        yield "sparse", lambda so_far: [replace(so_far, topk=count) for count in TOPK] if not so_far.rank else []
    yield "format", lambda so_far: [replace(so_far, kv_format=name) for name in FORMATS]
    half = num_layers // 2

    def by_layer(so_far: Choice) -> list[Choice]:
        """Where a step was too much for all layers: it for half of them, deep or shallow ones; half the dims, too."""
        found = []
        if half and so_far.kv_format != FORMATS[-1]:
            for span in (f"{half}-{num_layers - 1}", f"0-{half - 1}"):
                found.append(replace(so_far, layers=((span, FORMATS[-1]),)))
        if head_dim is not None and not so_far.rank and not so_far.topk and num_layers % 2 == 0:
            found.append(replace(so_far, ratios="1/2"))
        return found

    yield "layer ratios", by_layer


def tune(evaluator: Evaluator, num_layers: int, max_loss: float = MAX_LOSS, told: Told = lambda rung: None) -> Any:
    """Measure rung after rung; what is accepted is the ground of the next stage.

    max_loss   of perplexity, relative: 0.02 allows two percent more
    Returns {"rungs": [...], "knee": name, "chosen": rung}. A rung is accepted where it loses no more than max_loss and
    takes fewer bytes than what was accepted before, or the same with 5 percent more tokens per second. A stage ends at
    its first rung that loses more. A rung that the model cannot have is told with its reason and not accepted.
    """
    if not 0 < max_loss < 10:
        raise ArgumentError(f"max_loss is {max_loss}; it must be above 0 and below 10: 0.02 allows two percent")
    base = evaluator.document([])["baseline"]
    best = _rung("baseline", Choice(), {**base, "perplexity_change": 0.0}, accepted=True)
    found, so_far = [best], Choice()
    told(best)
    for stage, make in rungs(evaluator.head_dim, num_layers):
        for choice in make(so_far):
            try:
                figures = evaluator.evaluate(choice.scheme)
            except ArgumentError as error:
                found.append({"name": choice.scheme, "stage": stage, "accepted": False, "reason": str(error)})
                told(found[-1])
                continue
            lost = figures["perplexity_change"] > max_loss
            better = _better(figures, best)
            rung = _rung(stage, choice, figures, accepted=better and not lost)
            found.append(rung)
            told(rung)
            if rung["accepted"]:
                best, so_far = rung, choice
            if lost and stage != "layer ratios":
                break
    return {"rungs": found, "knee": knee([rung for rung in found if "reason" not in rung]), "chosen": best}


def _rung(stage: str, choice: Choice, figures: dict[str, Any], accepted: bool) -> dict[str, Any]:
    settings = {name: value for name, value in vars(choice).items() if value}
    keys = "perplexity", "perplexity_change", "kl", "cache_bytes", "cache_bytes_fp16", "tokens_per_s"
    kept = {key: figures[key] for key in keys if key in figures}
    return {"name": choice.scheme, "stage": stage, "settings": settings, **kept, "accepted": accepted}


def _better(figures: dict[str, Any], best: dict[str, Any]) -> bool:
    """Fewer bytes, or the same in clearly less time."""
    if figures["cache_bytes"] != best["cache_bytes"]:
        return bool(figures["cache_bytes"] < best["cache_bytes"])
    return bool(figures["tokens_per_s"] > FASTER * best["tokens_per_s"])


def knee(measured: Sequence[dict[str, Any]]) -> str:
    """The rung past which bytes cost most: of the best trade-offs, the one farthest below the line from end to end.

    Both axes count from the least to the most of the trade-offs. Source: Kneedle (Satopaa et al., 2011).
    """
    best = pareto(measured)
    front = sorted((one for one in measured if one["name"] in best), key=lambda one: one["cache_bytes"])
    first, last = front[0], front[-1]
    width = last["cache_bytes"] - first["cache_bytes"] or 1
    height = first["perplexity"] - last["perplexity"] or 1

    def below(one: dict[str, Any]) -> float:
        x, y = (one["cache_bytes"] - first["cache_bytes"]) / width, (one["perplexity"] - last["perplexity"]) / height
        return float(1 - x - y)

    return str(max(front, key=below)["name"])
