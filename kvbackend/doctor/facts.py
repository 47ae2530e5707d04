"""Facts: what a probe saw, as plain data. A fact is a dict with a `state` and value, source, raw or error by state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

STATES = ("value", "absent", "unreadable", "unparsed", "timeout", "crashed", "not_run")
RAW_LIMIT = 4096

Fact = dict[str, Any]
Facts = dict[str, Fact]


def value(what: Any, source: str = "", **more: Any) -> Fact:
    """A fact that was read."""
    return _fact("value", source, value=what, **more)


def absent(source: str = "") -> Fact:
    """Looked for and not there, which may be quite normal."""
    return _fact("absent", source)


def failed(state: str, source: str = "", error: str = "", raw: str = "") -> Fact:
    """There, or perhaps there, but of no use: unreadable, unparsed, timeout, crashed or not_run."""
    return _fact(state, source, error=error[:RAW_LIMIT], raw=raw[:RAW_LIMIT])


def maybe(what: Any, source: str = "", **more: Any) -> Fact:
    """`value` unless nothing was found, then `absent`."""
    return absent(source) if what in (None, "", [], {}) else value(what, source, **more)


def _fact(state: str, source: str, **more: Any) -> Fact:
    fact: Fact = {"state": state}
    if source:
        fact["source"] = source
    fact.update((k, v) for k, v in more.items() if k == "value" or v not in (None, ""))
    return fact


class View(Mapping[str, Any]):
    """Values of facts by key, for the judge: `view["torch.version"]` is None unless the fact has a value."""

    def __init__(self, facts: Facts, derived: dict[str, Any] | None = None) -> None:
        self.facts, self.derived = facts, derived or {}

    def __getitem__(self, key: str) -> Any:
        if key in self.derived:
            return self.derived[key]
        fact = self.facts.get(key)
        return fact.get("value") if fact else None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(set(self.facts) | set(self.derived)))

    def __len__(self) -> int:
        return len(set(self.facts) | set(self.derived))

    def state(self, key: str) -> str:
        """The state of a fact; `absent` for one that no probe produced."""
        if key in self.derived:
            return "absent" if self.derived[key] is None else "value"
        return self.facts[key]["state"] if key in self.facts else "absent"

    def source(self, key: str) -> str:
        """Where a fact was read."""
        return self.facts.get(key, {}).get("source", "")

    def error(self, key: str) -> str:
        """Why a fact has no value."""
        return self.facts.get(key, {}).get("error", "")
