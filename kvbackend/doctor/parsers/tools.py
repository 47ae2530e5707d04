"""Output of compilers, nvidia-smi and friends, and the texts of import errors."""

from __future__ import annotations

import re

_NVML_ERRORS = (
    ("mismatch", "Driver/library version mismatch"),
    ("unknown", "Failed to initialize NVML: Unknown Error"),
    ("nodriver", "couldn't communicate with the NVIDIA driver"),
)


def cuda_release(text: str) -> str:
    """`nvcc -V` and `ptxas -V`: the release with its patch."""
    match = re.search(r"release \d+\.\d+, V(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else ""


def nvidia_smi_query(text: str) -> list[dict[str, str]]:
    """The csv of --query-gpu=index,name,uuid,compute_cap,memory.total,driver_version,mig.mode.current."""
    names = ("index", "name", "uuid", "compute_cap", "memory_mb", "driver", "mig")
    rows = []
    for line in text.splitlines():
        cells = [c.strip() for c in line.split(",")]
        if len(cells) == len(names) and cells[0].isdigit():
            rows.append({n: "" if c == "[N/A]" else c for n, c in zip(names, cells)})
    return rows


def nvidia_smi_error(text: str) -> str:
    """mismatch, unknown or nodriver; '' for other text."""
    return next((kind for kind, token in _NVML_ERRORS if token in text), "")


def clang(text: str) -> dict[str, str] | None:
    """The first line of `bisheng --version`."""
    match = re.search(r"clang version (\d+(?:\.\d+)*)(?: \(clang-([0-9a-f]+))?", text)
    return {"version": match.group(1), "hash": match.group(2) or ""} if match else None


def first_version(text: str) -> str:
    """The first dotted number of a tool's version line."""
    match = re.search(r"\b(\d+(?:\.\d+)+|\d+)\b", text)
    return match.group(1) if match else ""


def device_nodes(listing: str) -> list[str]:
    """Node names of an `ls -l /dev/...` listing."""
    return re.findall(r"^c\S+.*\s/dev/(\S+)$", listing, re.M)


def pci_ids(listing: str) -> list[dict[str, str]]:
    """Accelerators of an `lspci` listing: bus and device id."""
    pattern = re.compile(r"^([0-9a-f:.]+) Processing accelerators: Huawei .*? Device ([0-9a-f]{4})\b", re.M)
    return [{"bus": bus, "device": device} for bus, device in pattern.findall(listing)]


def last_line(text: str) -> str:
    """The last line that is not blank: of a traceback, the error itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
