"""A verdict on this host: root causes first, with the way to mend each.

    from kvbackend import doctor
    report = doctor.run(level="import")
    report.exit_code, report.primary, report.document

Collect (probes, none of which can harm another) -> facts (plain data) -> judge (pure) -> render. Python 3.9 and the
standard library are enough, so the doctor runs where torch is absent or broken: `python -m kvbackend.doctor`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Report", "explain_import_error", "primary_cause", "run"]


def __getattr__(name: str) -> Any:
    if name in ("Report", "run"):
        from kvbackend.doctor import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def primary_cause(error: str = "") -> str | None:
    """The first cause of trouble that files alone show, with its remedy; None when they show none. Never raises.

    `error` is the text of a failure, which may name the cause when this host's facts support it.
    """
    try:
        from kvbackend.doctor.causes import first_cause

        return first_cause(error)
    except Exception:  # called while another error is being told
        return None


def explain_import_error(error: BaseException) -> str:
    """The text for an ImportError of one of our extensions: what failed, the one primary cause, what to run."""
    cause = primary_cause(str(error))
    return "{}\n{}run: kvbackend doctor".format(error, cause + "\n" if cause else "")
