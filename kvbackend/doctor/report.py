"""One run of the doctor: collect or load facts, judge them, and hold the outcome."""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from kvbackend.compat.data import Matrix, load_diagnoses, load_matrix
from kvbackend.compat.text import say
from kvbackend.doctor import saved
from kvbackend.doctor.collect import INTERRUPTED, ascend, collect
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host
from kvbackend.doctor.judge import Options, Verdict, judge
from kvbackend.doctor.judge.check import STATUSES
from kvbackend.doctor.redact import Redactor

SCHEMA = "kvbackend-doctor/1"
EXIT_BUG, EXIT_INTERRUPTED = 5, 130


class Report(NamedTuple):
    """The outcome of a run. `document` is the JSON form; `findings` and `checks` keep their translatable texts."""

    run: dict[str, Any]
    tool: dict[str, str]
    facts: Facts
    verdict: Verdict
    files_read: list[str]

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Every row, in order of display."""
        return self.verdict.checks

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What is wrong, failures and first causes first."""
        return self.verdict.findings

    @property
    def exit_code(self) -> int:
        """0 no failure, 1 a failure, 3 only warnings when strict, 4 no verdict."""
        return self.verdict.exit_code

    @property
    def primary(self) -> dict[str, Any] | None:
        """The finding to start with."""
        return self.findings[0] if self.findings else None

    @property
    def document(self) -> dict[str, Any]:
        """The JSON form, schema kvbackend-doctor/1."""
        return {
            "schema": SCHEMA,
            "tool": self.tool,
            "version": self.tool["version"],
            "run": self.run,
            "verdict": self.verdict.verdict,
            "exit_code": self.exit_code,
            "summary": self.verdict.summary,
            "facts": self.facts,
            "checks": self.checks,
            "findings": self.findings,
        }

    def redacted(self, redact: Redactor) -> Report:
        """The same report without what tells who and where."""
        run = dict(redact(self.run), redacted=True)
        verdict = self.verdict._replace(checks=redact(self.checks), findings=redact(self.findings))
        return self._replace(run=run, facts=redact(self.facts), verdict=verdict, files_read=redact(self.files_read))


def _broken(error: Exception) -> Verdict:
    """The outcome when the judge itself fails."""
    cause = say("the doctor itself failed: {error}", error=f"{type(error).__name__}: {error}")
    remedy = [{"text": say("report this with the output of --bundle"), "where": "here"}]
    finding: dict[str, Any] = {
        "id": "doctor-bug",
        "check": "doctor",
        "severity": "fail",
        "component": "doctor",
        "cause": cause,
        "confidence": "certain",
        "evidence": [traceback.format_exc()[-2000:]],
        "remedy": remedy,
        "primary": True,
    }
    counts = dict.fromkeys(STATUSES, 0)
    return Verdict("cpu", "", [], [finding], "inconclusive", EXIT_BUG, {**counts, "primary": "doctor-bug"})


def version() -> str:
    """The package's version."""
    import kvbackend

    return getattr(kvbackend, "__version__", "0")


def run(
    level: str = "static",
    *,
    backend: str = "auto",
    purpose: str = "run",
    root: str = "/",
    keep_going: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    strict: bool = False,
    matrix: Matrix | None = None,
    timeout: float | None = None,
    deadline: float | None = None,
    redact: bool = True,
    slow: Callable[[str], None] | None = None,
    argv: Sequence[str] = (),
    host: Host | None = None,
    aclnn: Sequence[str] = ascend.ACLNN,
) -> Report:
    """Judge this host, a mounted tree, or a saved bundle.

    level      static: files alone, no child, no import; import: also tools and imports, in children; device: also one
               tiny round trip per card
    backend    auto, ascend, cuda or cpu; purpose  run, jit or build: what must work
    root       a folder to look at instead of /, or a bundle that an earlier run wrote; both are judged from files alone
    timeout    seconds per probe (10, at device level 60; imports three times that); deadline  of the run (60, 300)
    redact     take user, host, home, addresses, serials and secrets out
    Raises kvbackend.compat.data.DataError for a bundle that cannot be read.
    """
    begin, started = time.monotonic(), datetime.datetime.now(datetime.timezone.utc)
    earlier = saved.load_bundle(root) if root != "/" else None
    device = level == "device"
    if earlier is not None:
        facts, level, host = earlier["facts"], earlier["run"]["level"], Host("/", environ={})
    else:
        host = host or Host(root)
        level = level if host.live else "static"
        facts = collect(
            host, level, timeout or (60 if device else 10), deadline or (300 if device else 60), slow, aclnn
        )
    options = Options(level, purpose, backend, keep_going, tuple(only), tuple(skip), strict)
    matrix = matrix or load_matrix()
    diagnoses = load_diagnoses()
    try:
        verdict = judge(facts, matrix, diagnoses, options)
    except Exception as error:  # the facts can still be handed on
        verdict = _broken(error)
    if INTERRUPTED in facts:
        verdict = verdict._replace(verdict="inconclusive", exit_code=EXIT_INTERRUPTED)
    about = {
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin, 3),
        "level": level,
        "purpose": purpose,
        "backend": verdict.backend,
        "backend_reason": verdict.backend_reason,
        "root": root,
        "redacted": False,
        "argv": list(argv),
    }
    report = Report(
        about,
        {"version": version(), "matrix": matrix.version, "diagnoses": diagnoses["version"]},
        facts,
        verdict,
        sorted(set(host.files_read)),
    )
    return report.redacted(Redactor.of_this_user(host.environ, facts)) if redact else report
