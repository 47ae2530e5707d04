"""Reports for other readers: one line per finding, markdown to paste, a script of the remedies."""

from __future__ import annotations

import json
from typing import Any

from kvbackend.doctor.render.words import ASCII_MARKS, MARKS, Words
from kvbackend.doctor.report import Report


def ci(report: Report, words: Words) -> list[str]:
    """One line per finding, then the verdict, all as key=value."""
    lines = []
    for finding in report.findings:
        found, expected = (",".join(finding.get(k, {}).values()) for k in ("found", "expected"))
        pairs = [
            ("found", found or "; ".join(words(e) for e in finding["evidence"])),
            ("need", expected),
            (
                "fix",
                (finding["remedy"] or [{"text": ""}])[0].get("command")
                or words((finding["remedy"] or [{"text": ""}])[0]["text"]),
            ),
        ]
        shown = " ".join(f"{k}={_quoted(v)}" for k, v in pairs if v)
        lines.append("{} {} id={} {}".format(finding["severity"].upper(), finding["check"], finding["id"], shown))
    counts = " ".join(f"{s}={report.verdict.summary[s]}" for s in ("fail", "warn", "unknown", "skip"))
    return [*lines, f"verdict={report.verdict.verdict} {counts} exit={report.exit_code}"]


def _quoted(text: str) -> str:
    text = " ".join(str(text).split())
    return text if text and not any(c in text for c in ' "=') else '"{}"'.format(text.replace('"', "'"))


def digest(report: Report) -> dict[str, Any]:
    """The small JSON at the end of a pasted report: run, verdict, findings, and the versions among the facts."""
    versions = {
        k: f["value"]
        for k, f in sorted(report.facts.items())
        if f["state"] == "value"
        and (
            k.endswith("version")
            or k
            in (
                "host.os",
                "host.arch",
                "host.glibc",
                "ascend.soc",
                "ascend.pci",
                "cuda.gpu.archs",
                "py.dists",
            )
        )
    }
    found = [{k: f[k] for k in ("id", "check", "severity", "evidence")} for f in report.findings]
    return {
        "schema": report.document["schema"] + "-digest",
        "tool": report.tool,
        "run": report.run,
        "verdict": report.verdict.verdict,
        "exit_code": report.exit_code,
        "summary": report.verdict.summary,
        "findings": found,
        "facts": versions,
    }


def markdown(report: Report, words: Words) -> str:
    """A report to paste into an issue."""
    run, marks = report.run, ASCII_MARKS if words.ascii_only else MARKS
    lines = [
        "## kvbackend doctor {}: {}".format(report.tool["version"], report.verdict.verdict),
        "",
        words(
            "backend: {b} ({why})   level: {level}   matrix: {matrix}",
            b=run["backend"],
            why=run["backend_reason"],
            level=run["level"],
            matrix=report.tool["matrix"],
        ),
        "",
    ]
    for finding in report.findings:
        lines += [
            "### {} {} `{}`".format(marks[finding["severity"]], words(finding["cause"]), finding["id"]),
            "",
        ]
        lines += ["- {}: {}".format(words("why"), words(e)) for e in finding["evidence"]]
        for remedy in finding["remedy"]:
            lines.append(
                "- {}: {}".format(words("do"), words(remedy["text"]))
                + ("  \n  `{}`".format(remedy["command"]) if remedy.get("command") else "")
            )
        lines += ["- {}: {}".format(words("source"), finding["rule"]["source"])] if finding.get("rule") else []
        lines.append("")
    lines += ["| | check | |", "|---|---|---|"]
    lines += [
        "| {} | {} | {} |".format(marks[c["status"]], c["id"], words(c["text"]).replace("|", "\\|").replace("\n", " "))
        for c in report.checks
    ]
    table = report.facts.get("ops.table", {}).get("value") or []
    if table:
        lines += ["", "| op | backend | | |", "|---|---|---|---|"]
        lines += [
            "| {} | {} | {} | {} |".format(
                r["op"], r["backend"], r["status"], "; ".join(r["reasons"]).replace("|", "\\|")
            )
            for r in table
        ]
    text = json.dumps(digest(report), indent=1, ensure_ascii=False)
    return "\n".join([*lines, "", "<details><summary>digest</summary>", "", "```json", text, "```", "</details>", ""])


def script(report: Report, words: Words) -> str:
    """The remedies as a shell script. What runs elsewhere, restarts something or has a gap to fill stays a comment."""
    lines = [
        "#!/usr/bin/env bash",
        "# " + words("Remedies by kvbackend doctor. Read each before you run it; nothing here was run."),
        "",
    ]
    for finding in report.findings:
        lines += ["# [{}] {}: {}".format(finding["severity"], finding["id"], words(finding["cause"]))]
        for remedy in finding["remedy"]:
            lines.append(
                "#   {} ({}, {})".format(words(remedy["text"]), remedy.get("where", "here"), remedy.get("risk", "none"))
            )
            command = remedy.get("command")
            if command:
                safe = (
                    remedy.get("where") == "here"
                    and remedy.get("risk") != "reboot"
                    and "<" not in command
                    and "..." not in command
                )
                lines.append(command if safe else "# " + command)
        lines.append("")
    return "\n".join(lines if report.findings else [*lines, "# " + words("nothing to mend"), ""])
