"""What a property of a call may be, as data: the rules that limits of vendors' functions are written in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..arrays import one_of


@dataclass(frozen=True)
class OneOf:
    """A list of values."""

    values: tuple[Any, ...]

    def allows(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return one_of(self.values)

    def violations(self) -> Iterator[Any]:
        """Values that are just not allowed, for tests."""
        if all(isinstance(value, int) for value in self.values):
            yield next(value for value in range(max(self.values), 0, -1) if value not in self.values)
            yield max(self.values) + 1


@dataclass(frozen=True)
class Steps:
    """Multiples of `step` from `low` to `high`."""

    step: int
    high: int
    low: int = 0

    def allows(self, value: int) -> bool:
        return max(self.low, 1) <= value <= self.high and value % self.step == 0

    def __str__(self) -> str:
        if self.step == 1:
            return f"{max(self.low, 1)} to {self.high}"
        return f"a multiple of {self.step} from {self.low or self.step} to {self.high}"

    def violations(self) -> Iterator[int]:
        if self.step > 1:
            yield (self.low or self.step) + 1
        yield self.high + self.step


@dataclass(frozen=True)
class Either:
    """A range, or one of some values above it."""

    steps: Steps
    values: OneOf

    def allows(self, value: int) -> bool:
        return self.steps.allows(value) or self.values.allows(value)

    def __str__(self) -> str:
        return f"{self.steps}, {self.values}"

    def violations(self) -> Iterator[int]:
        yield from self.steps.violations()
        yield from self.values.violations()


Rule = OneOf | Steps | Either


def one(*values: Any) -> OneOf:
    """One of these."""
    return OneOf(values)
