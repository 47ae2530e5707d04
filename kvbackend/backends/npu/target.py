"""The NPU of this process: product, torch_npu build and CANN, or why there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...compat import rules, versions
from ...doctor import primary_cause

# Products by the names that torch_npu.npu.get_device_name() gives (torch_npu 2.14.0; CANN runtime platform files)
_FAMILIES = (
    (re.compile(r"Ascend950PR_\w+"), "950PR"),
    (re.compile(r"Ascend950DT_\w+"), "950DT"),
    (re.compile(r"Ascend910B[1-4](-1)?"), "910B"),
    (re.compile(r"Ascend910_93\d\d"), "910_93"),
)
A2_A3 = ("910B", "910_93")
A5 = ("950PR", "950DT")
FAMILIES = (*A2_A3, *A5)


@dataclass(frozen=True)
class Target:
    """What a predicate needs to know about the machine.

    family   "910B" (A2), "910_93" (A3), "950PR" or "950DT"
    train    when the installed torch_npu was built, "2026-10": it decides the signatures, see schemas.json
    cann     CANN's version, as torch_npu reports it
    """

    family: str
    train: str
    cann: str


# Predicates answer for this one where no NPU is found, so that any machine can ask; `missing` says that there is none.
ASSUMED = Target("950PR", "2026-10", "9.1.0")


@dataclass(frozen=True)
class Found:
    """The machine's target, or the reasons why it has none."""

    target: Target | None = None
    reasons: tuple[str, ...] = ()


def current() -> Target:
    """The target that predicates answer for."""
    return found().target or ASSUMED


@cache
def snapshots() -> Mapping[str, Any]:
    """schemas.json: the wheels of each build train, and the schemas that each train has."""
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text())
    return loaded


def train_of(torch_npu: str) -> str | None:
    """The build train of a torch_npu version; the newest for one that is newer than all known; None if unknown."""
    wanted = versions.parse(torch_npu)
    if wanted is None:
        return None
    known = {versions.parse(wheel): train for train, wheels in snapshots()["wheels"].items() for wheel in wheels}
    older = [found for found in known if found is not None and found.release == wanted.release and found <= wanted]
    if wanted in older:
        return next(train for wheel, train in known.items() if wheel == wanted)
    newest = max(known.values())
    beyond = not any(found is not None and found >= wanted and found.release == wanted.release for found in known)
    return newest if beyond and (older or all(found is None or found < wanted for found in known)) else None


def family_of(soc: str) -> str | None:
    """The product family of a SoC name."""
    return next((family for pattern, family in _FAMILIES if pattern.fullmatch(soc)), None)


def _refuse(reason: str) -> Found:
    return Found(reasons=(reason,))


@cache
def found() -> Found:
    """Look once. torch_npu is imported only where that cannot end the process."""
    try:
        torch_npu = version("torch-npu")
    except PackageNotFoundError:
        return _refuse(
            "torch_npu is not installed; Ascend tensors need it beside CANN: install the torch-npu of your torch, "
            "see `kvbackend doctor`"
        )
    if torch.version.cuda is not None:
        return _refuse(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and torch_npu {torch_npu} is installed; "
            f"importing both ends the process (duplicate allocator options): use an environment with a CPU torch"
        )
    ruling = rules.torch_npu_torch(torch.__version__, torch_npu)
    if ruling.state == "bad":
        return _refuse(ruling.reason)
    train = train_of(torch_npu)
    if train is None:
        return _refuse(
            f"torch_npu is {torch_npu}, whose signatures are not known here; known are "
            f"{', '.join(wheel for wheels in snapshots()['wheels'].values() for wheel in wheels)}: install one of these"
        )
    return _ask_device(train)


def _ask_device(train: str) -> Found:
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:  # the loader, or torch_npu's own look at CANN
        cause = primary_cause(str(error)) or "it needs CANN's libraries on the loader path"
        return _refuse(
            f"torch_npu cannot be imported ({error}); {cause}: source CANN's set_env.sh and run `kvbackend doctor`"
        )
    if not torch_npu.npu.is_available():
        return _refuse("torch_npu finds no NPU; the driver must show one: run `npu-smi info` and `kvbackend doctor`")
    soc = torch_npu.npu.get_device_name()
    family = family_of(soc)
    if family is None:
        return _refuse(
            f"the NPU is {soc}; limits are known for Ascend910B, Ascend910_93, Ascend950PR and Ascend950DT: choose the "
            f"reference explicitly, kvbackend.use('reference')"
        )
    from torch_npu.npu.utils import get_cann_version

    return Found(Target(family, train, get_cann_version()))
