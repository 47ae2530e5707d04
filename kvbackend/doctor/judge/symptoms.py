"""Match failure kinds against texts: what imports and tools printed here, and logs that a user hands in."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvbackend.doctor.facts import View
from kvbackend.doctor.judge import evidence

LOG_LIMIT = 4 * 1024 * 1024


class Match(NamedTuple):
    """One failure kind found in a log: where, by which token, and how far this host supports it."""

    diagnosis: dict[str, Any]
    line: int
    text: str
    standing: str  # fits (this host), named (by the text itself) or possible


def log_of(view: View) -> str:
    """Every error text among the facts of a host."""
    parts = []
    for key in sorted(view.facts):
        fact = view.facts[key]
        answer = fact.get("value")
        if fact["state"] in ("unparsed", "timeout") or (isinstance(answer, dict) and answer.get("ok") is False):
            parts += [str(fact.get("error", "")), str(fact.get("raw", ""))]
            parts.append(str(answer.get("error", "")) if isinstance(answer, dict) else "")
    parts += view["ext.load_errors"] or []
    return "\n".join(p for p in parts if p)


def _pattern(symptom: str) -> str:
    if symptom.startswith("re:"):
        return symptom[3:]
    quoted = re.escape(symptom)
    return rf"(?<!\d){quoted}(?!\d)" if symptom.isdigit() else quoted


def matches(diagnosis: dict[str, Any], log: str) -> list[re.Match[str]]:
    """The first hit of each symptom in a log."""
    hits = (re.search(_pattern(s), log) for s in diagnosis["symptoms"])
    return [h for h in hits if h]


def explain(log: str, view: View, diagnoses: dict[str, Any]) -> list[Match]:
    """Failure kinds whose symptoms a log shows: those that fit this host first, then by the length of the token."""
    log = log[-LOG_LIMIT:]
    found = []
    for diagnosis in diagnoses["diagnoses"]:
        hits = matches(diagnosis, log)
        if not hits:
            continue
        best = max(hits, key=lambda h: (len(h.group(0)), -h.start()))
        if evidence.all_hold(diagnosis["when"], view):
            standing = "fits"
        else:
            standing = "named" if diagnosis.get("conclusive") else "possible"
        number = log.count("\n", 0, best.start()) + 1
        line = log.splitlines()[number - 1] if log.splitlines() else ""
        found.append(Match(diagnosis, number, line.strip()[:200] or best.group(0), standing))
    rank = {"fits": 0, "named": 1, "possible": 2}
    weight = {id(m): max(len(h.group(0)) for h in matches(m.diagnosis, log)) for m in found}
    return sorted(found, key=lambda m: (rank[m.standing], -weight[id(m)], m.diagnosis["id"]))
