"""What `kvbackend matrix --json` writes: the cells, and who ran them, where, when and with which versions."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__, backends
from ..native import build_facts, library
from .judge import Cell, summarize

SCHEMA = "kvbackend-matrix/1"


def document(cells: Sequence[Cell], devices: Sequence[str], quick: bool = False) -> dict[str, Any]:
    """The whole document. devices: those that ran; cells of other devices are only what backends say of them."""
    head = {"schema": SCHEMA, "version": __version__, **origin(devices), "quick": quick}
    return head | {"cells": [cell.to_dict() for cell in cells], "summary": summarize(cells)}


def origin(devices: Iterable[str]) -> dict[str, Any]:
    """Who ran it.

    date       UTC, to the second
    commit     of the source tree that the package lies in; None where it is installed
    host       platform, Python, torch, and how the kernels were built
    versions   of what cells depend on; only what is installed
    devices    names for torch
    chips      device type -> its name and its architecture: x86_64, sm_90, Ascend950PR_9599
    backends   name -> device type, what it declares as its evidence, and what this machine lacks for it
    """
    host: dict[str, Any] = dict(
        platform=platform.platform(), machine=platform.machine(), python=platform.python_version()
    )
    try:
        host |= build_facts()
    except ImportError as error:
        host["build"] = str(error)
    return dict(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        commit=commit(),
        host=host | {"torch": torch.__version__},
        versions=versions(),
        devices=list(devices),
        chips={torch.device(device).type: chip(device) for device in devices},
        backends={
            backend.name: dict(device=backend.device, evidence=backend.evidence, missing=list(backend.missing()))
            for backend in backends.registered().values()
        },
    )


def versions() -> dict[str, str]:
    """Of Python, torch and, where installed, what the backends stand on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "torch_npu"):
        try:
            found[name] = version(name.replace("_", "-"))
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    from ..backends.npu.target import found as npu

    if target := npu().target:
        found["cann"] = target.cann
    return found


def chip(device: str) -> dict[str, str]:
    """Its name and architecture."""
    from ..cache.crossover import device_name

    place = torch.device(device)
    name = device_name(place)
    if place.type == "cpu":
        name = name.rpartition(", ")[0]  # without the number of threads, which is no matter of the chip
        return dict(name=f"{name}, {library('cpu').isa or 'no'} kernels", arch=platform.machine())
    if place.type == "cuda":
        return dict(name=name, arch="sm_{}{}".format(*torch.cuda.get_device_capability(place)))
    return dict(name=name, arch=name)


def commit() -> str | None:
    """The commit of the source tree, with "+" where files differ from it; None outside one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def line(document: Mapping[str, Any], number: int) -> str:
    """A run in one line: `[1] cpu: AMD EPYC; torch 2.13.0, ...; kvbackend 0.1.0 (37c5525); 2026-11-29: 12 pass`."""
    chips = "; ".join(f"{kind}: {chip['name']}, {chip['arch']}" for kind, chip in document["chips"].items())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    commit = f" ({document['commit']})" if document.get("commit") else ""
    counts = ", ".join(f"{count} {status}" for status, count in document["summary"].items() if count)
    quick = ", --quick" if document.get("quick") else ""
    date = document["date"][:10]
    return f"[{number}] {chips}; {versions}; kvbackend {document['version']}{commit}; {date}{quick}: {counts}"
