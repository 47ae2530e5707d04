"""Teacher forcing through a cache, chunk by chunk, so that tokens are scored against what the cache gives back."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .sample import Passage, Query, Settings

BUCKETS = 4  # of positions, for each passage
RUN = 32  # neighbouring tokens whose losses may depend on each other
PIECE = 8  # distributions that are compared at a time: they stay in a CPU's caches
Z = 1.96  # standard errors on either side that hold 95 percent
GRAM = 4  # tokens of what counts as a repetition

Progress = Callable[[int], None]  # told how many more tokens went through the model


@dataclass
class Scores:
    """Sums over the scored tokens of one scheme.

    losses     (kind, position of the first, [rows, n] negative log-likelihoods) of each stretch
    """

    losses: list[tuple[str, int, Tensor]] = field(default_factory=list)
    kl: float = 0.0
    agreed: int = 0
    right: dict[str, list[bool]] = field(default_factory=dict)  # answers that were found, by the kind of question
    hits: int = 0  # code tokens that were the most likely
    generated: list[int] = field(default_factory=list)
    cache_bytes: int = 0
    cache_bytes_fp16: int = 0
    seconds: float = 0.0
    tokens: int = 0  # through the model, in `seconds`
    backends: dict[str, str | None] = field(default_factory=dict)

    def loss(self, kind: str) -> float:
        """Mean negative log-likelihood of a kind of text."""
        parts = [losses.flatten() for what, _, losses in self.losses if what == kind]
        return float(torch.cat(parts).double().mean())

    def count(self, kind: str) -> int:
        """Scored tokens of a kind."""
        return sum(losses.numel() for what, _, losses in self.losses if what == kind)


@dataclass
class Baseline:
    """What full precision says: log-probabilities [rows, n, vocabulary] of each scored stretch, and its scores."""

    scores: Scores
    logprobs: list[Tensor]


def run(
    model: Any,
    make_cache: Callable[[], Any],
    cache_name: str,
    sample: list[Passage],
    settings: Settings,
    baseline: Baseline | None = None,
    progress: Progress = lambda tokens: None,
) -> Baseline:
    """Score a sample through caches that `make_cache` makes, one for each passage, compared with a baseline if given.

    Returns the scores, with log-probabilities only where there is no baseline to compare with.
    """
    found = Baseline(Scores(), [])
    stretches = iter(baseline.logprobs) if baseline else None
    for passage in sample:
        cache = make_cache()
        feed = _Feed(model, cache, cache_name, progress)
        start = time.perf_counter()
        _score(feed, passage, settings, found, stretches)
        found.scores.seconds += time.perf_counter() - start
        found.scores.tokens += passage.ids.shape[0] * passage.length
        if passage.kind == "code":
            found.scores.generated = _generate(feed, passage, settings.new_tokens)
        found.scores.backends |= cache.backends or {}
    return found


class _Feed:
    """Tokens into a model over one cache."""

    def __init__(self, model: Any, cache: Any, cache_name: str, progress: Progress) -> None:
        self.model, self.cache, self.cache_name, self.progress = model, cache, cache_name, progress
        self.length = 0
        self.keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def __call__(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Log-probabilities [rows, n, vocabulary] after the tokens `wanted` [n] of these ids [rows, T]."""
        rows, count = ids.shape
        start, self.length = self.length, self.length + count
        options = {"logits_to_keep": wanted if len(wanted) else torch.tensor([count - 1])} if self.keeps else {}
        with torch.no_grad():
            logits = self.model(
                ids,
                attention_mask=torch.ones(rows, self.length, dtype=torch.int64, device=ids.device),
                position_ids=torch.arange(start, self.length, device=ids.device).expand(rows, -1),
                **{self.cache_name: self.cache},
                **options,
            ).logits
        self.progress(ids.numel())
        if not self.keeps:
            logits = logits[:, wanted]
        return logits[:, : len(wanted)].float().log_softmax(-1)


def _chunks(passage: Passage, size: int) -> Iterator[tuple[int, int]]:
    """Beginning and end of every forward; one ends where the context does, one where the scored tokens do."""
    at = 0
    for stop in (passage.context, passage.context + passage.scored, passage.length):
        while at < stop:
            end = min(at + size, stop)
            yield at, end
            at = end


def _score(
    feed: _Feed, passage: Passage, settings: Settings, found: Baseline, stretches: Iterator[Tensor] | None
) -> None:
    ids = passage.ids.to(feed.model.device)
    scores, length = found.scores, passage.length
    first, last = passage.context, passage.context + passage.scored
    answers = {position for query in passage.queries for position in range(query.start, query.end)}
    right: dict[int, Tensor] = {}  # position -> [rows] whether its token was the most likely
    for start, end in _chunks(passage, settings.chunk):
        wanted = [p for p in range(start + 1, min(end + 1, length)) if first <= p < last or p in answers]
        logprobs = feed(ids[:, start:end], torch.tensor([p - 1 - start for p in wanted], dtype=torch.int64))
        if wanted:
            scored = [i for i, p in enumerate(wanted) if first <= p < last]
            best = logprobs.argmax(-1)  # [rows, n]
            hit = best == ids[:, wanted]
            right.update((p, hit[:, i]) for i, p in enumerate(wanted) if p in answers)
            if scored:
                own = logprobs[:, scored[0] : scored[-1] + 1]  # they follow each other
                targets = ids[:, [wanted[i] for i in scored]]
                losses = -own.gather(-1, targets[..., None])[..., 0]
                scores.losses.append((passage.kind, wanted[scored[0]], losses.cpu()))
                scores.hits += int(hit[:, scored].sum()) if passage.kind == "code" else 0
                if stretches is None:
                    found.logprobs.append(own)
                else:
                    full = next(stretches)
                    scores.kl += _divergence(own, full)
                    scores.agreed += int((full.argmax(-1) == best[:, scored]).sum())
        if end == first:
            feed.cache.evict()  # the prompt ends here: policies that decide once do
        if end == last and passage.kind == "prose":
            scores.cache_bytes += feed.cache.cache_bytes
            scores.cache_bytes_fp16 += feed.cache.cache_bytes_fp16
    for query in passage.queries:
        scores.right.setdefault(query.kind, []).append(_found(query, right))


def _divergence(own: Tensor, full: Tensor) -> float:
    """Kullback-Leibler divergence of [rows, n, vocabulary] from full precision, in nats, summed over all tokens."""
    total = 0.0
    for part, wanted in zip(own.flatten(0, 1).split(PIECE), full.flatten(0, 1).split(PIECE), strict=True):
        each = torch.nn.functional.kl_div(part, wanted, reduction="none", log_target=True)
        total += float(each.sum(-1).double().sum())
    return total


def _found(query: Query, right: dict[int, Tensor]) -> bool:
    return all(bool(right[position][query.row]) for position in range(query.start, query.end))


def _generate(feed: _Feed, passage: Passage, count: int) -> list[int]:
    """Greedy tokens after a passage of one row, from its token that is still to be fed."""
    tokens: list[int] = []
    token = passage.ids[:1, -1:].to(feed.model.device)
    for _ in range(count):
        token = feed(token, torch.tensor([0])).argmax(-1)
        tokens.append(int(token))
    return tokens


def repetition(tokens: list[int]) -> float:
    """Share of the runs of GRAM tokens that came before in the same text."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def margin(scores: Scores, full: Scores) -> float:
    """Half of the 95 percent interval of the mean loss of prose beyond that of full precision, token by token.

    Had other text been scored, it would mostly fall within. Runs of RUN tokens are taken as independent of each other,
    the tokens of one not: cluster-robust standard error.
    """
    pairs = [
        (losses.double() - other.double()).split(RUN, 1)
        for (kind, _, losses), (_, _, other) in zip(scores.losses, full.losses, strict=True)
        if kind == "prose"
    ]
    runs = [run for parts in pairs for run in parts]  # [rows, up to RUN] each
    count = sum(run.numel() for run in runs)
    mean = sum(run.sum() for run in runs) / count
    sums = torch.cat([(run - mean).sum(1) for run in runs])
    return float(Z * sums.square().sum().sqrt() / count)


def by_position(scores: Scores) -> list[dict[str, Any]]:
    """Mean loss of prose by how many tokens came before, in equal buckets of all positions."""
    prose = [(position, losses) for kind, position, losses in scores.losses if kind == "prose"]
    positions = torch.cat([position + torch.arange(losses.shape[1]) for position, losses in prose])
    means = torch.cat([losses.double().mean(0) for _, losses in prose])
    low, high = int(positions.min()), int(positions.max()) + 1
    width = math.ceil((high - low) / BUCKETS)
    found = []
    for start in range(low, high, width):
        inside = (positions >= start) & (positions < start + width)
        if bool(inside.any()):
            end = min(start + width, high)
            found.append({"from": start, "to": end, "loss": round(float(means[inside].mean()), 4)})
    return found
