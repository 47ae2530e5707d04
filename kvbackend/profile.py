"""A profile: the scheme that `kvbackend tune` found for a model, and what it measured, as a small TOML file.

`run`, `eval` and `plan` take one by --profile, and `patch(model, profile=...)` of the transformers integration.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import ArgumentError
from .planner.schemes import parse

SCHEMA = "kvbackend-profile/1"


@dataclass(frozen=True)
class Profile:
    """What `tune` writes.

    scheme             how tokens are stored, as for `kvbackend run --kv-format`
    model              that it was measured on
    perplexity_change  relative, against full precision
    cache_bytes, cache_bytes_fp16   of the measured text
    tokens_per_s       through the model, teacher-forced, on the machine that measured
    configuration_id   that of the measurement, as `kvbackend eval` records it
    calibration        a file of projections beside the profile, if the scheme has a rank
    """

    scheme: str
    model: str
    perplexity_change: float
    cache_bytes: int
    cache_bytes_fp16: int
    tokens_per_s: float
    configuration_id: str
    calibration: str = ""

    def need_model(self, name: str) -> None:
        """Raise ArgumentError where another model than the one measured is to use the profile."""
        if name != self.model:
            raise ArgumentError(
                f"--profile was measured on {self.model}; the model is {name}, which may lose more: run kvbackend tune "
                f"on it, or write its name into the profile"
            )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file; it appears whole or not at all."""
        # a JSON string or number is a TOML one
        lines = [f"{name} = {json.dumps(value)}" for name, value in {"schema": SCHEMA, **asdict(self)}.items()]
        write_whole(path, ("\n".join(lines) + "\n").encode())


def read(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file. Raises ArgumentError for one that is not whole or not such a one."""
    try:
        found = toml().loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a TOMLDecodeError is a ValueError
        raise ArgumentError(
            f"profile {str(path)!r} cannot be read ({error}); `kvbackend tune` writes one: make it"
        ) from error
    if found.pop("schema", None) != SCHEMA:
        raise ArgumentError(f"profile {path} is no {SCHEMA}; it must be one that `kvbackend tune` wrote: make it again")
    known = {field.name: field for field in fields(Profile)}
    absent = [name for name, field in known.items() if name not in found and field.default is MISSING]
    if absent or (unknown := sorted(found.keys() - known.keys())):
        told = f"lacks {', '.join(absent)}" if absent else f"has {', '.join(unknown)}"
        raise ArgumentError(f"profile {path} {told}; its keys are {', '.join(known)}: make it again, or correct it")
    _judge(path, found)
    profile = Profile(**found)
    if profile.calibration:
        beside = Path(path).parent / profile.calibration
        return Profile(**{**asdict(profile), "calibration": str(beside)})
    return profile


def need_place(path: str | os.PathLike[str]) -> None:
    """Raise ArgumentError where a file could not be written: to be asked before long work, not after it."""
    target = Path(path)
    if target.is_dir() or not target.name:
        raise ArgumentError(f"{os.fspath(path)!r} names no file; one is written there: name it")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ArgumentError(
            f"{target} cannot be written; its folder must exist and be writable: make it, or name another"
        )


def _judge(path: str | os.PathLike[str], found: dict[str, Any]) -> None:
    """Raise ArgumentError for values that no measurement gives: the file may have been edited."""
    for name in ("scheme", "model", "configuration_id", "calibration"):
        value = found.get(name, "")
        if not isinstance(value, str) or not (value or name == "calibration"):
            raise ArgumentError(f"profile {path} has {name} = {value!r}; it must be a text: correct it")
    for name, least, whole in (
        ("perplexity_change", -1, False),
        ("cache_bytes", 0, True),
        ("cache_bytes_fp16", 0, True),
        ("tokens_per_s", 0, False),
    ):
        value = found[name]
        fitting = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not fitting or not least < value < math.inf:
            kind = "a whole number" if whole else "a number"
            raise ArgumentError(f"profile {path} has {name} = {value!r}; it must be {kind} above {least}: correct it")
    try:
        parse(found["scheme"])
    except ArgumentError as error:
        raise ArgumentError(f"profile {path} has a scheme that cannot be had; {error}") from error


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    target = Path(path)
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise ArgumentError(
            f"{target} cannot be written ({error.strerror}); its folder must exist and be writable: make it, or name "
            f"another"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def toml() -> Any:
    """tomllib, which is a part of Python from 3.11 on, or tomli, which is the same for 3.10."""
    for name in ("tomllib", "tomli"):
        try:
            return __import__(name)
        except ImportError:
            continue
    raise ArgumentError("the file is TOML, which this Python 3.10 cannot read; tomli can: run pip install tomli")


def alone(profile: str | None, given: Iterable[str]) -> None:
    """Raise ArgumentError where options say again what a profile says."""
    if profile is not None and (others := list(given)):
        raise ArgumentError(
            f"--profile is given with {', '.join(others)}; a profile says how tokens are stored: give one of the two"
        )
