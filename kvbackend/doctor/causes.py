"""The one cause to name when an extension of ours does not import."""

from __future__ import annotations

from kvbackend.compat.data import load_diagnoses, load_matrix
from kvbackend.doctor.collect import collect
from kvbackend.doctor.host import Host
from kvbackend.doctor.judge import Options, judge
from kvbackend.doctor.judge.derive import derive
from kvbackend.doctor.judge.symptoms import explain


def first_cause(error: str = "", host: Host | None = None) -> str | None:
    """Cause and remedy in one line: what the error names and this host supports, else the stack's first failure."""
    matrix, diagnoses = load_matrix(), load_diagnoses()
    facts = collect(host or Host(), "static", timeout=2, deadline=4, aclnn=())
    found = [
        m.diagnosis for m in explain(error, derive(facts, matrix, "run", "auto"), diagnoses) if m.standing != "possible"
    ]
    if not found:
        verdict = judge(facts, matrix, diagnoses, Options(level="static"))
        found = [f for f in verdict.findings if f["severity"] == "fail"]
    return f"{found[0]['cause']}: {found[0]['remedy'][0]['text']}" if found else None
