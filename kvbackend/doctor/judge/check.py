"""What a check is: an id, where it stands in the graph, and a function from the view to a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvbackend.compat.text import say
from kvbackend.doctor.facts import View

# order of display; the number says how early in the chain of causes a section stands
SECTIONS = {
    "Host": 7,
    "Device": 0,
    "Driver": 1,
    "Toolkit": 4,
    "NNAL": 6,
    "Python": 8,
    "Frameworks": 9,
    "Compilers": 10,
    "Environment": 2,
    "Libraries": 3,
    "kvbackend": 11,
    "Matrix": 5,
    "Proof": 12,
}
STATUSES = ("ok", "warn", "fail", "skip", "unknown", "info")


class Row(NamedTuple):
    """What a check saw: a status, a text for it, and whether a verdict is impossible without it."""

    status: str
    text: str = ""
    blocked: bool = False


class Check(NamedTuple):
    """One row of the report. `ruling` names the matrix question it answers; `bad` is the severity of a bad answer."""

    id: str
    section: str
    backend: str  # any, ascend or cuda
    show: Callable[[View], Row | None]  # None: there is nothing to say
    about: str
    needs: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    level: str = "static"
    ruling: str = ""
    bad: str = "fail"
    unknown_warns: bool = False


def ok(template: str, **params: object) -> Row:
    """A row where all is well."""
    return Row("ok", say(template, **params))


def info(template: str, **params: object) -> Row:
    """A row that is worth knowing and no fault."""
    return Row("info", say(template, **params))


def unknown(template: str, **params: object) -> Row:
    """A row for what is absent and may be, or cannot be read."""
    return Row("unknown", say(template, **params))


def blocked(template: str, **params: object) -> Row:
    """A row without which no verdict is possible."""
    return Row("unknown", say(template, **params), blocked=True)


def plain(key: str, template: str, missing: str = "") -> Callable[[View], Row | None]:
    """Show one fact in `{value}`; when it is not there, `missing` as an unknown row, or nothing."""

    def show(view: View) -> Row | None:
        value = view[key]
        if value is not None:
            return ok(template, value=value)
        return unknown(missing) if missing else None

    return show


def listed(values: Iterable[object]) -> str:
    """Values in a row."""
    return ", ".join(map(str, values))


def gib(number: int) -> str:
    """A number of bytes for people."""
    return "%.0f GiB" % (number / 2**30) if number >= 2**30 else "%.0f MiB" % (number / 2**20)
