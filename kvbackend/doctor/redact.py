"""Take out what tells who and where: user, host, home, addresses, serials, uuids, tokens, secret variables."""

from __future__ import annotations

import os
import re
from re import Pattern
from typing import Any

from kvbackend.compat.text import Text

_SECRET_NAME = re.compile(r"SECRET|TOKEN|KEY|PASS|API|AUTH|CRED", re.I)
_RULES: tuple[tuple[str, str], ...] = (
    (r"(://)[^/\s:@]+:[^/\s@]+@", r"\1<secret>@"),
    (r"\b(?:sk|hf|ghp|gho|glpat|github_pat|xox[abp]|pypi)[-_][A-Za-z0-9_\-]{12,}", "<token>"),
    (r"\bAKIA[A-Z0-9]{12,}|\beyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]+)?", "<token>"),
    (
        r"(?i)\b((?:[a-z_]*(?:token|secret|password|passwd|api_?key|authorization))\s*[=:]\s*)(?!<)\S+",
        r"\1<secret>",
    ),
    (r"(?i)\b(?:GPU-|MIG-)?[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", "<uuid>"),
    (r"(?i)((?:Serial Number|[VN]Die ID|Slot Serial)\s*:\s*)(?!NA\b)\S[^\n]*", r"\1<serial>"),
    (r"(?i)\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", "<mac>"),
    (r"(?i)(?<![\w:.])(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}(?![\w:])", "<ip>"),
    (r"(?i)(?<![\w:.])(?:[0-9a-f]{1,4}:){1,6}(?::[0-9a-f]{1,4}){1,6}(?![\w:])", "<ip>"),
    (r"/(home|Users)/[^/\s:'\"]+", r"/\1/<user>"),
)
_QUAD = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")


class Redactor:
    """Built once from the host's names and the facts' own versions, which look like addresses and stay."""

    def __init__(
        self, environ: dict[str, str], facts: dict[str, Any], home: str = "", user: str = "", host: str = ""
    ) -> None:
        self._literal: list[tuple[Pattern[str], str]] = []
        for name in sorted(environ):
            value = environ[name]
            if (
                _SECRET_NAME.search(name)
                and len(value) >= 6
                and not value.startswith("/")
                and value.lower() not in ("enable", "disable")
            ):
                self._literal.append((re.compile(re.escape(value)), "<secret>"))
        if len(home) > 1:
            self._literal.append((re.compile(r"(?<![\w/.-]){}(?![\w-])".format(re.escape(home.rstrip("/")))), "~"))
        for text, mark in ((user, "<user>"), (host, "<host>")):
            if len(text) >= 3 and text not in ("root", "localhost"):
                self._literal.append((re.compile(rf"(?<![A-Za-z0-9]){re.escape(text)}(?![A-Za-z0-9])"), mark))
        self._rules = [(re.compile(p), r) for p, r in _RULES]
        self._versions = {
            q
            for text in _strings([f.get("value") for k, f in facts.items() if _is_version(k)])
            for q in _QUAD.findall(text)
        }

    @classmethod
    def of_this_user(cls, environ: dict[str, str], facts: dict[str, Any]) -> Redactor:
        """For the user, home and host of this process."""
        return cls(
            environ,
            facts,
            environ.get("HOME") or os.path.expanduser("~"),
            environ.get("USER") or environ.get("LOGNAME") or "",
            os.uname().nodename,
        )

    def text(self, text: str) -> str:
        """One text, redacted."""
        for pattern, mark in self._literal + self._rules:
            text = pattern.sub(mark, text)
        return _QUAD.sub(self._address, text)

    def _address(self, match: re.Match[str]) -> str:
        quad = match.group(0)
        if quad in self._versions or quad in ("0.0.0.0", "127.0.0.1") or any(int(n) > 255 for n in quad.split(".")):
            return quad
        return "<ip>"

    def __call__(self, value: Any) -> Any:
        """The same structure with every string redacted, keys of objects too; messages stay translatable."""
        if isinstance(value, Text):
            clean = type(value)(self.text(value))
            clean.template, clean.params = value.template, {k: self(v) for k, v in value.params.items()}
            return clean
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(k) if isinstance(k, str) else k: self(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(v) for v in value]
        return value


def _is_version(key: str) -> bool:
    return (
        key.endswith(
            (
                "version",
                ".driver",
                ".firmware",
                ".kernel",
                ".user",
                ".nvml",
                ".packages",
                ".trees",
                ".accepts",
                "requires",
                "gpus",
            )
        )
        or key == "py.dists"
    )


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for v in value.values() for s in _strings(v)]
    return [s for v in value for s in _strings(v)] if isinstance(value, (list, tuple)) else []
