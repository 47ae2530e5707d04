"""Judge: facts, matrix and failure kinds in, checks and findings out. Pure: no clock, no file, no order of keys."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from kvbackend.compat.data import Matrix
from kvbackend.compat.rules import Ruling
from kvbackend.compat.text import say
from kvbackend.doctor.collect import LEVELS
from kvbackend.doctor.facts import Facts, View
from kvbackend.doctor.judge import ascend, cuda, evidence, machine, software
from kvbackend.doctor.judge.check import SECTIONS, STATUSES, Check, Row
from kvbackend.doctor.judge.derive import derive, rulings
from kvbackend.doctor.judge.symptoms import log_of, matches

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        machine.CHECKS + ascend.CHECKS + cuda.CHECKS + software.CHECKS,
        key=lambda check: list(SECTIONS).index(check.section),
    )
)
PURPOSES = ("run", "jit", "build")
BACKENDS = ("auto", "ascend", "cuda", "cpu")


class Options(NamedTuple):
    """What the user wants to know; part of the input of the judge."""

    level: str = "import"
    purpose: str = "run"
    backend: str = "auto"
    keep_going: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    strict: bool = False


class Verdict(NamedTuple):
    """The outcome: plain checks and findings, ready for JSON."""

    backend: str
    backend_reason: str
    checks: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    verdict: str
    exit_code: int
    summary: dict[str, Any]


def choose_backend(view: View, requested: str) -> tuple[str, str]:
    """ascend, cuda, both or cpu, and why."""
    if requested != "auto":
        return requested, f"--backend {requested}"
    ascend_pci, cuda_pci = view["ascend.pci"] or [], view["cuda.pci"] or []
    seen = [f"PCI 19e5:{ascend_pci[0]['device']} x{len(ascend_pci)}"] if ascend_pci else []
    seen += [f"PCI 10de:{cuda_pci[0]['device']} x{len(cuda_pci)}"] if cuda_pci else []
    if view["ascend.present"] or view["cuda.present"]:
        name = (
            "both"
            if view["ascend.present"] and view["cuda.present"]
            else "ascend"
            if view["ascend.present"]
            else "cuda"
        )
        return name, "auto: " + (", ".join(seen) or "device nodes")
    if view["torch_npu.version"] is not None:
        return "ascend", "auto: torch_npu is installed"
    return "cpu", "auto: no accelerator found"


def judge(facts: Facts, matrix: Matrix, diagnoses: dict[str, Any], options: Options) -> Verdict:
    """Every check that applies, in order of display, and what was found to be wrong, first causes first."""
    view = derive(facts, matrix, options.purpose, options.backend)
    backend, reason = choose_backend(view, options.backend)
    answers = rulings(view, matrix)
    log = log_of(view)
    named = [d for d in diagnoses["diagnoses"] if _named(d, view, log)]
    by_check: dict[str, list[dict[str, Any]]] = {}
    for diagnosis in named:
        by_check.setdefault(diagnosis["check"], []).append(diagnosis)

    rows: dict[str, dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    blocked = False
    for check in sorted(CHECKS, key=lambda c: SECTIONS[c.section]):
        if not _applies(check, backend, options) or any(fnmatchcase(check.id, g) for g in options.skip):
            continue
        row = check.show(view)
        wrong = _findings(
            check, row, view, by_check.get(check.id, []), answers.get(check.ruling), options, log, diagnoses
        )
        if row is None and not wrong:
            continue
        cause = None if options.keep_going else _cause(check, rows)
        if cause:
            rows[check.id] = {
                "id": check.id,
                "section": check.section,
                "status": "skip",
                "because": cause,
                "text": say("not judged because {cause} failed", cause=cause),
                "facts": list(check.facts),
            }
            continue
        status = row.status if row else "ok"
        severities = [f["severity"] for f in wrong] + [status]
        status = next((s for s in ("fail", "warn") if s in severities), status)
        text = wrong[0]["cause"] if wrong and status in ("fail", "warn") else row.text if row else ""
        rows[check.id] = {
            "id": check.id,
            "section": check.section,
            "status": status,
            "text": text,
            "facts": list(check.facts),
        }
        found += wrong
        blocked = blocked or bool(row and row.blocked)
    if options.only:
        rows = {k: v for k, v in rows.items() if any(fnmatchcase(k, g) for g in options.only)}
        found = [f for f in found if f["check"] in rows]
    checks = [rows[c.id] for c in CHECKS if c.id in rows]
    return _summarize(backend, reason, checks, found, blocked, options)


def _applies(check: Check, backend: str, options: Options) -> bool:
    fits = check.backend == "any" or check.backend == backend or backend == "both"
    return fits and LEVELS.index(check.level) <= LEVELS.index(options.level)


def _named(diagnosis: dict[str, Any], view: View, log: str) -> bool:
    """Whether a failure kind may be named: its evidence holds, or a text of this host names it beyond doubt."""
    held = evidence.all_hold(diagnosis["when"], view)
    if diagnosis["trigger"] == "facts" and held:
        return True
    return (held or diagnosis.get("conclusive", False)) and bool(matches(diagnosis, log))


def _cause(check: Check, rows: dict[str, dict[str, Any]]) -> str | None:
    """The first failed check among those that this one needs; a skipped one hands on what it was skipped for."""
    for need in check.needs:
        row = rows.get(need)
        if row and row["status"] == "fail":
            return need
        if row and row["status"] == "skip" and "because" in row:
            return row["because"]
    return None


def _findings(
    check: Check,
    row: Row | None,
    view: View,
    named: list[dict[str, Any]],
    ruling: Ruling | None,
    options: Options,
    log: str,
    diagnoses: dict[str, Any],
) -> list[dict[str, Any]]:
    found = [_from_diagnosis(d, check, view, ruling, options.purpose) for d in named]
    if not found and ruling and (ruling.state == "bad" or (ruling.state == "unknown" and check.unknown_warns)):
        found.append(_from_ruling(check, ruling, options.purpose))
    if (
        check.id in ("torch.import", "torch_npu.import")
        and view[check.id[:-7] + ".imports"] is False
        and not any(f["severity"] == "fail" for f in found)
    ):
        found.append(_import_failed(check, view, log, diagnoses))
    if not found and row and row.status in ("warn", "fail"):
        got, _, do = str(row.text).rpartition(": ")
        found.append(_finding(check.id, check, row.status, row.text, "certain", [got], [{"text": do, "where": "here"}]))
    return found


def _finding(
    id: str,
    check: Check,
    severity: str,
    cause: str,
    confidence: str,
    lines: list[str],
    remedy: list[dict[str, str]],
    **more: Any,
) -> dict[str, Any]:
    return {
        "id": id,
        "check": check.id,
        "severity": severity,
        "component": more.pop("component", check.section.lower()),
        "cause": cause,
        "confidence": confidence,
        "evidence": lines,
        "remedy": remedy,
        "primary": False,
        **more,
    }


def _softened(severity: str, check: Check, purpose: str) -> str:
    """A compiler that is wrong stops what is compiled on demand or built, not what merely runs."""
    return "warn" if severity == "fail" and check.section == "Compilers" and purpose == "run" else severity


def _from_diagnosis(
    row: dict[str, Any], check: Check, view: View, ruling: Ruling | None, purpose: str
) -> dict[str, Any]:
    more: dict[str, Any] = {"component": row["component"], "rule": {"source": ", ".join(row["source"])}}
    for key, _, other in (c for c in row["when"] if isinstance(c, list) and len(c) == 3):
        if isinstance(other, str) and other.startswith("@"):
            more.update(found={key: str(view[key])}, expected={key: str(view[other[1:]])})
    if ruling and ruling.state == "bad":
        more.update(
            found={"value": ruling.found},
            expected={"value": ruling.expected},
            rule={"matrix_row": ruling.row, "source": ruling.source},
        )
    remedy = [dict(r, command=fill(r["command"], view)) if "command" in r else dict(r) for r in row["remedy"]]
    for entry in remedy:
        entry["text"] = say(entry["text"])
    return _finding(
        row["id"],
        check,
        _softened(row["severity"], check, purpose),
        say(row["cause"]),
        row["confidence"],
        evidence.lines(row["when"], view),
        remedy,
        **more,
    )


def _from_ruling(check: Check, ruling: Ruling, purpose: str) -> dict[str, Any]:
    severity = _softened(check.bad, check, purpose) if ruling.state == "bad" else "warn"
    more: dict[str, Any] = {"found": {"value": ruling.found}, "expected": {"value": ruling.expected}}
    if ruling.source:
        more["rule"] = {"matrix_row": ruling.row, "source": ruling.source}
    text = (
        say("use {expected}", expected=ruling.expected)
        if ruling.expected
        else say("see kvbackend doctor --explain {id}", id=check.id)
    )
    return _finding(
        check.id,
        check,
        severity,
        ruling.reason,
        "certain" if ruling.state == "bad" else "possible",
        [ruling.found],
        [{"text": text, "where": "here"}],
        **more,
    )


def _import_failed(check: Check, view: View, log: str, diagnoses: dict[str, Any]) -> dict[str, Any]:
    """An import that fails for a reason no failure kind explains: what it said, and what that may mean."""
    name = check.id[:-7]
    possible = [d["id"] for d in diagnoses["diagnoses"] if matches(d, log)]
    error = str(view[name + ".import.error"])
    remedy = [{"text": say("see kvbackend doctor --explain {id}", id=i), "where": "here"} for i in possible[:3]] or [
        {
            "text": say("run the import by itself and read its whole message"),
            "where": "here",
            "command": f"python -c 'import {name}'",
        }
    ]
    return _finding(
        "import-failed",
        check,
        "fail",
        say("import {name} fails: {error}", name=name, error=error),
        "certain",
        [error],
        remedy,
        component=name,
    )


def fill(command: str, view: View) -> str:
    """A command with facts filled in: {torch_npu.base} becomes its value, or <torch_npu.base> where there is none."""
    return re.sub(
        r"\{([a-z_]+(?:\.[a-z_0-9]+)+)\}",
        lambda m: f"<{m.group(1)}>" if view[m.group(1)] is None else str(view[m.group(1)]),
        command,
    )


def _summarize(
    backend: str,
    reason: str,
    checks: list[dict[str, Any]],
    found: list[dict[str, Any]],
    blocked: bool,
    options: Options,
) -> Verdict:
    counts = {status: sum(1 for c in checks if c["status"] == status) for status in STATUSES}
    for severity in ("fail", "warn"):
        first = next((f for f in found if f["severity"] == severity), None)
        if first:
            first["primary"] = True
            break
    found = [f for s in ("fail", "warn", "info") for f in found if f["severity"] == s]
    primary = found[0]["id"] if found else None
    if counts["fail"]:
        verdict, code = "fail", 1
    elif blocked:
        verdict, code = "inconclusive", 4
    elif counts["warn"]:
        verdict, code = "warn", 3 if options.strict else 0
    else:
        verdict, code = "ok", 0
    return Verdict(backend, reason, checks, found, verdict, code, {**counts, "primary": primary})
