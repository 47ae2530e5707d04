"""The text that every scheme is measured on: prose with planted facts, and code. The same ids for the same inputs."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import texts
from ..errors import ArgumentError

CODE_MODULE = "textwrap"  # of Python's library
NEEDLE = "\n\nThe telephone number of Mr. {} is {}.\n\n"
ORDER = "\n\nOrder {} for Mr. {} was paid with {} euros.\n\n"
DEPTHS = (0.15, 0.4, 0.65, 0.9)  # of the context, where a fact is planted: needles and orders in turns
NAMES = ("Miller", "Baker", "Jones", "Turner")


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    contexts       tokens before the scored ones, a batch for each
    rows           texts of a batch
    scored         tokens of each text whose loss counts
    chunk          tokens of a forward; what evicts decides after each
    code_context, code_scored   the same for code, one text
    new_tokens     of greedy generation after the code
    """

    contexts: tuple[int, ...] = (1024, 2048, 4096, 7040)
    rows: int = 2
    scored: int = 1024
    chunk: int = 128
    code_context: int = 1024
    code_scored: int = 512
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = min(value, default=0) if isinstance(value, tuple) else value
            if least < 1:
                raise ArgumentError(f"{name} is {value}; it must be 1 or more: pass a count")


QUICK = Settings(contexts=(1024,), code_context=128, code_scored=64, new_tokens=12)


@dataclass(frozen=True)
class Query:
    """A fact that is asked for at the end of a row: the tokens [start, end) are the answer.

    kind   "needle": a telephone number by its owner; "exact": an amount by its order number
    """

    kind: str
    row: int
    start: int
    end: int


@dataclass(frozen=True)
class Passage:
    """A batch of rows of equal length: context, scored tokens, queries.

    kind      "prose" or "code"; after code comes one token more, from which the model goes on by itself
    ids       [rows, length]
    """

    kind: str
    ids: Tensor
    context: int
    scored: int
    queries: tuple[Query, ...] = ()

    @property
    def length(self) -> int:
        """Tokens that are fed: all but the one after code."""
        return self.ids.shape[1] - (self.kind == "code")


def passages(
    tokenizer: Any, text: str, settings: Settings, limit: int | None = None, skip: int = texts.CALIBRATION_TOKENS
) -> list[Passage]:
    """The batches of a text, evenly spread over it, and one of code.

    limit   the model's context: a passage that is longer is refused
    skip    first tokens of the text that are left out, since projections are fitted to them
    """
    ids = _ids(tokenizer, text)[skip:]
    found = []
    for context in settings.contexts:
        wanted = context + settings.scored
        step = (len(ids) - wanted) // max(settings.rows - 1, 1)
        if len(ids) < wanted or (settings.rows > 1 and step < 1):
            raise ArgumentError(
                f"the text has {len(ids)} tokens after the first {skip}; {settings.rows} passages of {wanted} are "
                f"wanted: pass a longer text, or fewer tokens"
            )
        rows = [_row(tokenizer, ids[row * step :][:wanted], context, row) for row in range(settings.rows)]
        shortest = min(len(row) for row, _ in rows)
        queries = tuple(query for _, asked in rows for query in asked)
        assert all(query.end <= shortest for query in queries)
        found.append(
            Passage("prose", torch.stack([row[:shortest] for row, _ in rows]), context, settings.scored, queries)
        )
    code = _ids(tokenizer, _code())
    wanted = settings.code_context + settings.code_scored
    if len(code) <= wanted:
        raise ArgumentError(f"{CODE_MODULE} has {len(code)} tokens; {wanted + 1} are wanted: ask for less code")
    found.append(Passage("code", code[None, : wanted + 1], settings.code_context, settings.code_scored))
    for passage in found:
        longest = passage.ids.shape[1] + (settings.new_tokens if passage.kind == "code" else 0)
        if limit is not None and longest > limit:
            raise ArgumentError(
                f"a passage of {longest} tokens is wanted; the model's context is {limit}: ask for shorter contexts"
            )
    return found


def digest(found: Sequence[Passage]) -> str:
    """What tells samples apart: 16 hex digits over all token ids and where they are scored."""
    whole = hashlib.sha256()
    for passage in found:
        whole.update(repr((passage.kind, passage.context, passage.scored, passage.ids.tolist())).encode())
    return whole.hexdigest()[:16]


def _row(tokenizer: Any, ids: Tensor, context: int, row: int) -> tuple[Tensor, list[Query]]:
    """A row with facts planted in its context, and questions after its scored tokens."""
    numbers = [_number(row, i) for i in range(2 * len(DEPTHS))]
    facts: list[Tensor] = []
    asked: list[tuple[str, str, str]] = []  # kind, beginning, answer
    for i, name in enumerate(NAMES):
        code, amount = numbers[2 * i], numbers[2 * i + 1][:3]
        if i % 2:
            facts.append(_ids(tokenizer, ORDER.format(code, name, amount)))
            asked.append(("exact", f"\n\nOrder {code} for Mr. {name} was paid with", f" {amount}"))
        else:
            facts.append(_ids(tokenizer, NEEDLE.format(name, code)))
            asked.append(("needle", f"\n\nThe telephone number of Mr. {name} is", f" {code}"))
    prompt = ids[min(sum(map(len, facts)), context) : context]  # what the facts take is cut from the beginning
    ends = [int(depth * len(prompt)) for depth in DEPTHS]
    parts = [
        part for start, end, fact in zip([0, *ends], ends, facts, strict=False) for part in (prompt[start:end], fact)
    ]
    planted = torch.cat([*parts, prompt[ends[-1] :]])[:context]
    pieces, queries, length = [planted, ids[context:]], [], len(ids)
    for kind, beginning, answer in asked:
        question, wanted = _ids(tokenizer, beginning), _ids(tokenizer, answer)
        pieces += [question, wanted]
        start = length + len(question)
        length = start + len(wanted)
        queries.append(Query(kind, row, start, length))
    return torch.cat(pieces), queries


def _number(row: int, index: int) -> str:
    """Five digits, all different texts; the same each time."""
    return str(10000 + int(hashlib.sha256(f"{row} {index}".encode()).hexdigest(), 16) % 90000)


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)


def _code() -> str:
    found = importlib.util.find_spec(CODE_MODULE)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")
