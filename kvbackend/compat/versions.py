"""Version texts of torch, CANN, drivers and firmware: one grammar that orders them all.

Vendors write `8.1.RC1`, `8.0.T63`, `8.2.RC1.alpha003`, `9.0.0-beta.2`, `25.7.rc1.6`, `26.1.0.b083`, `2.10.0.post4+cpu`.
Within one major.minor.patch the order is trial < dev < alpha < beta < rc < release < build and post; a missing third
number is 0, letters compare without case, a local part after `+` is ignored.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_GRAMMAR = re.compile(r"v?\d+(?:[._-]?(?:\d+|[a-z]+))*")
_STAGE = {
    "t": -6,
    "dev": -5,
    "alpha": -4,
    "a": -4,
    "beta": -3,
    "rc": -2,
    "c": -2,
    "b": 1,
    "build": 1,
    "post": 2,
}
_END = (0, -1)


class Version(NamedTuple):
    """A parsed version. Compare with <, ==; `release` is what stands before any word."""

    release: tuple[int, int, int]
    tail: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    text: str

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return self[:2] < other[:2]

    def __le__(self, other: tuple[Any, ...]) -> bool:
        return self[:2] <= other[:2]

    def __gt__(self, other: tuple[Any, ...]) -> bool:
        return self[:2] > other[:2]

    def __ge__(self, other: tuple[Any, ...]) -> bool:
        return self[:2] >= other[:2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self[:2] == other[:2]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:2])


def parse(text: object) -> Version | None:
    """Parse any version text of the field; None when it is not one. Never raises."""
    if not isinstance(text, str) or len(text) > 64:
        return None
    clean = text.strip().lower().split("+")[0]
    if not _GRAMMAR.fullmatch(clean):
        return None
    tokens = re.findall(r"\d+|[a-z]+", clean.lstrip("v"))
    numbers: list[int] = []
    while tokens and tokens[0].isdigit():
        numbers.append(int(tokens.pop(0)))
    tail = [(0, n) for n in numbers[3:]]
    while tokens:
        token = tokens.pop(0)
        if token.isdigit():
            tail.append((0, int(token)))
            continue
        if token not in _STAGE:
            return None
        stage = _STAGE[token]
        if token == "b" and "." + token not in clean and "-" + token not in clean:
            stage = _STAGE["beta"]  # 2.0b1 is a beta, 26.1.0.b083 a build
        tail.append((stage, int(tokens.pop(0)) if tokens and tokens[0].isdigit() else 0))
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return Version((major, minor, patch), (*tuple(tail), _END), tuple(numbers), text.strip())


def base(text: object) -> str:
    """X.Y.Z of a version without post, local or pre-release parts; '' when unparsable."""
    version = parse(text)
    return ".".join(map(str, version.release)) if version else ""


def fits(pattern: str, text: object) -> bool:
    """Whether a version belongs to a vendor's pattern: `9.1.X`, `25.7.RC1` (with its builds) or an exact version."""
    version = parse(text)
    if version is None:
        return False
    if pattern.upper().endswith(".X"):
        wanted = parse(pattern[:-2])
        return wanted is not None and version.release[: len(wanted.numbers)] == wanted.numbers
    wanted = parse(pattern)
    if wanted is None or version.release != wanted.release:
        return False
    stages = wanted.tail[:-1]
    return version == wanted or (bool(stages) and version.tail[: len(stages)] == stages)


def within(text: object, bounds: str) -> bool | None:
    """Whether a version meets a vendor's range such as `>=7.6, <=8.2` or `8.2`; None when either cannot be read.

    A bound without words compares at its own precision, so 8.2.0.0.201 meets `<=8.2`.
    """
    version = parse(text)
    clauses = [c.strip() for c in bounds.strip().strip('"').split(",") if c.strip()]
    if version is None or not clauses:
        return None
    for clause in clauses:
        match = re.fullmatch(r"(>=|<=|==|>|<|=)?\s*(\S+)", clause)
        bound = parse(match.group(2)) if match else None
        if match is None or bound is None:
            return None
        if not _meets(version, match.group(1) or "==", bound):
            return False
    return True


def between(text: object, ranges: list[tuple[str, str]]) -> bool | None:
    """Whether a version lies in one of the closed ranges; None when nothing can be compared."""
    answers = [within(text, ">={}, <={}".format(*pair)) for pair in ranges]
    return True if True in answers else (False if False in answers else None)


def _meets(version: Version, operator: str, bound: Version) -> bool:
    left: tuple[Any, ...] = version[:2]
    right: tuple[Any, ...] = bound[:2]
    if len(bound.tail) == 1 and len(bound.numbers) <= 3:
        left, right = version.release[: len(bound.numbers)], bound.numbers
    return {">=": left >= right, "<=": left <= right, ">": left > right, "<": left < right}.get(operator, left == right)
