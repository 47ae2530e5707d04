"""Does a failure kind's evidence hold? A `when` is a list of clauses, all of which must; the words are few.

    ["torch.base", "!=", "@torch_npu.base"]      compare with a literal, or with another fact (@)
    ["ascend.cann.active", "absent"]             present, absent; true, false, not-true; empty
    ["env.X", "mentions", "text"]                also not-mentions, lacks, in, not-in, prefix
    {"any": [clause, ...]}                       one of them is enough

A comparison with something unknown never holds, so an unreadable fact cannot convict.
"""

from __future__ import annotations

from typing import Any, Callable, Union

from kvbackend.compat import versions
from kvbackend.doctor.facts import View

Clause = Union[list[Any], dict[str, list[Any]]]


def _ordered(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(left: Any, right: Any) -> bool:
        if isinstance(left, str) and isinstance(right, str):
            left, right = versions.parse(left), versions.parse(right)
        if left is None or right is None or type(left) is not type(right):
            return False
        return test(left, right)

    return compare


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


UNARY: dict[str, Callable[[Any], bool]] = {
    "present": lambda v: v is not None,
    "absent": lambda v: v is None,
    "true": lambda v: v is True,
    "false": lambda v: v is False,
    "not-true": lambda v: v is not True,
}
BINARY: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a is not None and a == b,
    "!=": lambda a, b: a is not None and b is not None and a != b,
    "<": _ordered(lambda a, b: a < b),
    ">": _ordered(lambda a, b: a > b),
    ">=": _ordered(lambda a, b: a >= b),
    "in": lambda a, b: a is not None and a in b,
    "not-in": lambda a, b: a not in b,
    "mentions": lambda a, b: a is not None and b in _text(a),
    "not-mentions": lambda a, b: a is None or b not in _text(a),
    "lacks": lambda a, b: b not in (a or []),
    "prefix": lambda a, b: a is not None and str(a).startswith(b),
}


def holds(clause: Clause, view: View) -> bool:
    """Whether one clause holds."""
    if isinstance(clause, dict):
        return any(holds(inner, view) for inner in clause["any"])
    left = view[clause[0]]
    if len(clause) == 2:
        unreadable = clause[1] == "absent" and view.state(clause[0]) in (
            "unreadable",
            "timeout",
            "crashed",
            "not_run",
        )
        return UNARY[clause[1]](left) and not unreadable
    right = clause[2]
    if isinstance(right, str) and right.startswith("@"):
        right = view[right[1:]]
    return BINARY[clause[1]](left, right)


def all_hold(when: list[Clause], view: View) -> bool:
    """Whether the whole evidence holds; no evidence at all does not."""
    return bool(when) and all(holds(clause, view) for clause in when)


def _shown(key: str, view: View) -> str:
    value = view[key]
    if value is None:
        return f"{key} is absent"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    source = view.source(key)
    return "{} is {}{}".format(key, text[:160], f" ({source})" if source else "")


def facts_used(when: list[Clause], view: View | None = None) -> tuple[str, ...]:
    """Keys that a `when` reads, in order; with a view only those of alternatives that hold."""
    keys: list[str] = []
    for clause in when:
        if isinstance(clause, dict):
            keys += facts_used([c for c in clause["any"] if view is None or holds(c, view)], view)
            continue
        keys.append(clause[0])
        if len(clause) == 3 and isinstance(clause[2], str) and clause[2].startswith("@"):
            keys.append(clause[2][1:])
    return tuple(dict.fromkeys(keys))


def lines(when: list[Clause], view: View) -> list[str]:
    """The evidence in words: each fact that was compared, its value and where it was read."""
    return [_shown(key, view) for key in facts_used(when, view) if key != "purpose"]
