"""Explain a check or a failure kind, or what a log shows."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from kvbackend.compat.text import say
from kvbackend.doctor.facts import View
from kvbackend.doctor.judge import CHECKS, evidence, fill
from kvbackend.doctor.judge.symptoms import Match
from kvbackend.doctor.render.words import Words

_COST = {"static": "files only", "import": "seconds, in a child", "device": "uses the cards"}


def list_checks(words: Words) -> list[str]:
    """Every check: id, section, level, cost."""
    size = max(len(c.id) for c in CHECKS) + 2
    return [f"{c.id:{size}}{c.section:13}{c.level:8}{words(_COST[c.level]):20}{words(c.about)}" for c in CHECKS]


def explain_id(id: str, diagnoses: dict[str, Any], words: Words) -> list[str] | None:
    """Text on a check or a failure kind; None when there is none of that name."""
    lines: list[str] = []
    for check in (c for c in CHECKS if c.id == id):
        lines += [f"{check.id}  ({check.section}, {check.level})", "  " + words(check.about)]
        lines += ["  {}: {}".format(words("needs"), ", ".join(check.needs))] if check.needs else []
        lines += ["  {}: {}".format(words("reads"), ", ".join(check.facts))] if check.facts else []
        kinds = [d for d in diagnoses["diagnoses"] if d["check"] == id]
        lines += ["  {} {}: {}".format(d["severity"], d["id"], words(d["cause"])) for d in kinds]
    for row in (d for d in diagnoses["diagnoses"] if d["id"] == id):
        lines += [
            "{}  ({}, {}, {})".format(row["id"], row["component"], row["severity"], row["confidence"]),
            "  " + words(row["cause"]),
        ]
        keys = evidence.facts_used(row["when"])
        lines += (
            ["  {}: {}".format(words("shows in"), "  ".join(repr(s) for s in row["symptoms"]))]
            if row["symptoms"]
            else []
        )
        lines += ["  {}: {}".format(words("reads"), ", ".join(keys))] if keys else []
        for remedy in row["remedy"]:
            lines.append(
                "  {}: {}".format(words("do"), words(remedy["text"]))
                + ("\n        " + fill(remedy["command"], View({})) if remedy.get("command") else "")
            )
        lines.append("  {}: {} ({})".format(words("source"), ", ".join(row["source"]), row["date"]))
    return lines or None


def near(id: str, diagnoses: dict[str, Any]) -> list[str]:
    """Names that contain a wrong id, for the message."""
    names = [c.id for c in CHECKS] + [d["id"] for d in diagnoses["diagnoses"]]
    return [n for n in names if fnmatchcase(n, f"*{id}*")][:6] or names[:3]


def explain_log(found: list[Match], view: View, words: Words) -> list[str]:
    """What a log shows: matches that fit this host or name themselves in full, the rest in one line."""
    if not found:
        return [words("nothing in this text matches a known failure kind")]
    lines: list[str] = []
    told = {
        "fits": "fits this host",
        "named": "named by the text itself",
        "possible": "possible; this host does not show it",
    }
    strong = [m for m in found if m.standing != "possible"] or found[:1]
    for match in strong:
        row = match.diagnosis
        lines += [
            words('line {n}: "{text}"', n=match.line, text=match.text),
            "  {} {} ({})".format(words("→"), row["id"], words(told[match.standing])),
            "    " + words(row["cause"]),
        ]
        shown = evidence.lines(row["when"], view)
        lines += ["    {}: {}".format(words("here"), "; ".join(shown))] if shown else []
        for remedy in row["remedy"]:
            lines.append("    {}:   {}".format(words("do"), words(say(remedy["text"]))))
            lines += ["          " + fill(remedy["command"], view)] if remedy.get("command") else []
    others = [m.diagnosis["id"] for m in found if m not in strong]
    return [
        *lines,
        "  {}: {}".format(words("other kinds with such a token"), ", ".join(others) or words("none")),
    ]
