"""The screen: sections, problems with why and do, the table of ops, and one sentence at the end.

A screen is a list of lines, a line a list of (text, style) pieces; `paint` puts colour on them.
"""

from __future__ import annotations

from typing import Any

from kvbackend.doctor.judge.check import SECTIONS
from kvbackend.doctor.render.words import Words, cells, count, wrap
from kvbackend.doctor.report import EXIT_INTERRUPTED, Report

Line = list[tuple[str, str]]
_STYLE = {
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "skip": "dim",
    "unknown": "cyan",
    "info": "dim",
}
_INDENT = 13


def screen(report: Report, words: Words, width: int = 100, detail: int = 0, quiet: bool = False) -> list[Line]:
    """Lines for a terminal; `detail` 1 shows every check, 2 also evidence, timing and the files that were read."""
    lines: list[Line] = []
    if not quiet:
        lines += _head(report, words)
    for change in report.run.get("baseline", []):
        lines.append(
            [
                (words("changed  "), "bold yellow"),
                ("{}: {} -> {}".format(change["fact"], change["before"], change["after"]), ""),
            ]
        )
    for section in SECTIONS:
        lines += _section(section, report, words, width, detail, quiet)
    table = report.facts.get("ops.table", {}).get("value")
    if table and not quiet:
        lines += [[], *ops_table(table, words, width, detail)]
    if detail > 1:
        lines += [[]] + [[(words("read  "), "dim"), (path, "dim")] for path in report.files_read]
    return [*lines, *([[]] if lines else []), *_end(report, words, width)]


def _head(report: Report, words: Words) -> list[Line]:
    run = report.run
    about = words(
        "backend: {b} ({why})   level: {level}   matrix: {matrix}",
        b=run["backend"],
        why=run["backend_reason"],
        level=run["level"],
        matrix=report.tool["matrix"],
    )
    return [[("kvbackend doctor {}".format(report.tool["version"]), "bold"), ("   " + about, "dim")], []]


def _section(section: str, report: Report, words: Words, width: int, detail: int, quiet: bool) -> list[Line]:
    rows = [c for c in report.checks if c["section"] == section]
    merged = [c for c in rows if c["status"] == "ok" and c["text"]]
    shown: list[tuple[str, list[str], dict[str, Any]]] = []
    if detail:
        for row in rows:
            shown.append((row["status"], [words(row["text"]) or words("ok")], row))
    else:
        if merged and not quiet:
            shown.append(("ok", [", ".join(words(c["text"]) for c in merged)], {}))
        for row in rows:
            if row["status"] in ("warn", "fail") or (
                not quiet and (row["status"] in ("unknown", "info") or (row["status"] == "skip" and "because" in row))
            ):
                shown.append((row["status"], [words(row["text"])], row))
    lines: list[Line] = []
    title = words(section)
    for status, texts, row in shown:
        mark = words.marks[status]
        hang = " " * (_INDENT + cells(mark) + 1)
        name = row.get("id", "") + "  " if detail or status == "skip" else ""
        for i, text in enumerate(wrap(name + texts[0], max(40, width - len(hang)))):
            if i:
                lines.append([(hang, ""), (text, "")])
            else:
                lines.append(
                    [
                        (title + " " * (_INDENT - cells(title)) if not lines else " " * _INDENT, "bold"),
                        (mark + " ", _STYLE[status]),
                        (text, "dim" if status in ("skip", "info") else ""),
                    ]
                )
        if row and status in ("warn", "fail"):
            for finding in (f for f in report.findings if f["check"] == row["id"]):
                lines += _finding(finding, words, width, hang, row["text"])
        if detail > 1 and row:
            lines += _evidence(row, report, hang)
    return lines


def _finding(finding: dict[str, Any], words: Words, width: int, hang: str, said: str) -> list[Line]:
    lines: list[Line] = []
    if finding["cause"] != said:
        lines += [[(hang, ""), (text, "")] for text in wrap(words(finding["cause"]), width - len(hang))]
    why = "; ".join(words(e) for e in finding["evidence"]) + "   [{}]".format(finding["check"])
    lines += _labelled(words("why"), why, words, width, hang)
    for remedy in finding["remedy"]:
        text = words(remedy["text"])
        if remedy.get("where", "here") != "here":
            text += " ({})".format(
                words(
                    {"host": "on the host", "image": "in the image", "admin": "by the host's administrator"}[
                        remedy["where"]
                    ]
                )
            )
        lines += _labelled(words("do"), text, words, width, hang)
        if remedy.get("command"):
            lines.append([(hang + " " * 7, ""), (words(remedy["command"]), "bold")])
    return lines


def _labelled(label: str, text: str, words: Words, width: int, hang: str) -> list[Line]:
    lines: list[Line] = []
    for i, part in enumerate(wrap(text, max(40, width - len(hang) - 7))):
        lines.append([(hang + (" " * 2 + label + " " * (5 - cells(label)) if not i else " " * 7), "dim"), (part, "")])
    return lines


def _evidence(row: dict[str, Any], report: Report, hang: str) -> list[Line]:
    lines: list[Line] = []
    for key in row["facts"]:
        fact = report.facts.get(key)
        if fact:
            shown = fact.get("value", fact.get("error", ""))
            text = "{}: {} {}".format(key, fact["state"], "" if shown == "" else str(shown)[:200])
            lines.append(
                [
                    (
                        hang
                        + "  "
                        + text.rstrip()
                        + "  [{}]  {} ms".format(fact.get("source", "-"), fact.get("ms", "-")),
                        "dim",
                    )
                ]
            )
    return lines


def ops_table(table: list[dict[str, Any]], words: Words, width: int, detail: int) -> list[Line]:
    """Op x backend: will run, refused (with the reason), or needs device proof. The reference runs them all."""
    names = list(dict.fromkeys(r["backend"] for r in table))
    ops = list(dict.fromkeys(r["op"] for r in table))
    cell = {(r["op"], r["backend"]): r for r in table}
    told = {
        "runs": words("will run"),
        "refused": words("refused"),
        "unproven": words("needs device proof"),
        "absent": words("no kernel"),
    }
    style = {"runs": "green", "refused": "yellow", "unproven": "cyan", "absent": "dim"}
    first = max([cells(o) for o in ops] + [cells(words("op"))]) + 2
    size = max([cells(t) for t in told.values()] + [cells(n) for n in names]) + 2
    lines: list[Line] = [
        [(words("op") + " " * (first - cells(words("op"))), "bold")]
        + [(n + " " * (size - cells(n)), "bold") for n in names]
        + [("reference", "bold")]
    ]
    reasons: dict[str, list[str]] = {}
    for op in ops:
        line: Line = [(op + " " * (first - cells(op)), "")]
        for name in names:
            row = cell.get((op, name))
            text = told[row["status"]] if row else "-"
            line.append((text + " " * (size - cells(text)), style[row["status"]] if row else "dim"))
            for reason in row["reasons"] if row and row["status"] == "refused" else []:
                reasons.setdefault(f"{name}: {reason}", []).append(op)
        lines.append([*line, (told["runs"], "dim")])
    for reason, who in list(reasons.items())[: None if detail else 6]:
        subject = words("every op") if len(who) == len(ops) else ", ".join(who)
        lines += [
            [("  " if not i else "    ", ""), (part, "dim")]
            for i, part in enumerate(
                wrap(
                    words("{backend} refuses {ops}", backend=reason.partition(": ")[0], ops=subject)
                    + ": "
                    + reason.partition(": ")[2],
                    width - 4,
                )
            )
        ]
    return lines


def _end(report: Report, words: Words, width: int) -> list[Line]:
    summary, seconds = report.verdict.summary, report.run["seconds"]
    quiet_skips = sum(1 for c in report.checks if c["status"] == "skip" and "because" not in c)
    summary = {**summary, "skip": summary["skip"] - quiet_skips}  # what the purpose does not need is no news
    parts = [
        count(words, summary[s], one, many)
        for s, one, many in (
            ("fail", "{n} failure", "{n} failures"),
            ("warn", "{n} warning", "{n} warnings"),
            ("skip", "{n} skipped", "{n} skipped"),
            ("unknown", "{n} unknown", "{n} unknown"),
        )
        if summary[s]
    ]
    total = sum(summary[s] for s in ("ok", "warn", "fail", "skip", "unknown", "info"))
    if report.verdict.verdict == "ok":
        unknown = ", " + parts[-1] if summary["unknown"] else ""
        text = words(
            "All clear: {n} checks, nothing wrong{unknown}, in {s} s.",
            n=total,
            unknown=unknown,
            s=f"{seconds:.1f}",
        )
        return [[(text, "bold green")]]
    if not report.checks and report.primary:
        return [[(words(report.primary["cause"]), "bold red")], [(words(report.primary["remedy"][0]["text"]), "")]]
    style = {"fail": "bold red", "warn": "bold yellow"}.get(report.verdict.verdict, "bold cyan")
    text = words("{parts} in {s} s.", parts=", ".join(parts) or words("nothing wrong"), s=f"{seconds:.1f}")
    if report.verdict.verdict == "inconclusive":
        interrupted = report.exit_code == EXIT_INTERRUPTED
        text += " " + words(
            "interrupted: what was finished is shown"
            if interrupted
            else "No verdict: a check that it needs gave no answer."
        )
    lines: list[Line] = [[(text, style)]]
    first = report.primary
    if first and first["remedy"]:
        lines += [
            [(part, "bold")] for part in wrap(words("Start here: {do}", do=words(first["remedy"][0]["text"])), width)
        ]
        lines.append([(words("More: kvbackend doctor --explain {id}", id=first["id"]), "dim")])
    lines.append([(words("For a bug report: kvbackend doctor --report"), "dim")])
    return lines
