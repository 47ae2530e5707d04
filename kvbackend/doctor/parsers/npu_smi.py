"""`npu-smi` output of every known family: 910A, 910B, A3, 310P, 950.

A table is a column grid whose header names the columns; no offset is fixed, and a row may be a character short.
"""

from __future__ import annotations

import re
from typing import Any

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ERRORS = (
    ("busy", re.compile(r"device is used\. ret is (-?\d+)")),
    ("dcmi", re.compile(r"dcmi modul?e?l? initiali[sz]ed? failed.*?ret is (-?\d+)")),
    ("library", re.compile(r"error while loading shared libraries: (\S+?):")),
    ("usage", re.compile(r"(?:Error parameter of (\S+)|^Usage: npu-smi)", re.M)),
    ("card", re.compile(r"(Invalid card id)")),
)


def clean(text: str) -> str:
    """Text without colour codes."""
    return _ANSI.sub("", text)


def error(text: str) -> dict[str, str] | None:
    """The class of a failure (busy, dcmi, library, usage, card) with its code or name; None for other text."""
    text = clean(text)[:65536]
    for kind, pattern in _ERRORS:
        match = pattern.search(text)
        if match:
            return {"kind": kind, "detail": (match.group(1) or "").strip()}
    return None


def info(text: str) -> dict[str, Any] | None:
    """`npu-smi info`: driver version, chips and processes; None when the text is no such table."""
    lines = clean(text).splitlines()
    head = re.search(r"npu-smi\s+(\S+)\s+Version:\s+(\S+)", clean(text)[:65536])
    if not head:
        return None
    chips: list[dict[str, Any]] = []
    processes: list[dict[str, Any]] = []
    header: list[list[str]] = []
    first: list[list[str]] | None = None
    in_processes = False
    for line in lines:
        if not line.startswith("|"):
            continue
        cells = [_words(c) for c in line.strip().strip("|").split("|")]
        joined = " ".join(w for c in cells for w in c)
        if "Process id" in joined:
            in_processes = True
        elif joined.startswith(("NPU", "Chip")) or "Bus-Id" in joined:
            header.append([w for c in cells for w in c])
        elif "npu-smi" in joined or joined.startswith("No running"):
            continue
        elif in_processes:
            _process(cells, processes)
        elif first is None:
            first = cells
        else:
            chip = _chip(first, cells, header)
            first = None
            if chip:
                chips.append(chip)
    return {"driver": head.group(2), "chips": chips, "processes": processes}


def _words(cell: str) -> list[str]:
    return re.split(r"\s{2,}", cell.strip()) if cell.strip() else []


def _chip(top: list[list[str]], bottom: list[list[str]], header: list[list[str]]) -> dict[str, Any] | None:
    """One chip from its two rows. The last cell holds usages `a / b`: hugepages above, memory and HBM below."""
    names = [w for row in header for w in row]
    flat = [w for cell in top[:-2] for w in cell]
    if len(top) < 3 or len(bottom) < 2 or len(flat) < 2 or not flat[0].isdigit() or not top[-2]:
        return None
    own = [w for cell in bottom[:-2] for w in cell]
    upper = top[-1]
    usages = [(int(a), int(b)) for a, b in re.findall(r"(\d{1,12})\s*/\s*(\d{1,12})", "  ".join(bottom[-1]))]
    hbm = usages[-1] if "HBM-Usage(MB)" in names and len(usages) > 1 else None
    memory = usages[0] if usages and hbm is None else None
    bus = bottom[-2][0] if bottom[-2] else ""
    power = upper[0] if upper and re.fullmatch(r"\d+(?:\.\d+)?", upper[0]) else None
    return {
        "npu": int(flat[0][:9]),
        "name": flat[1],
        "health": top[-2][0],
        "chip": int(own[0][:9]) if own and own[0].isdigit() else 0,
        "phy": int(own[1][:9]) if len(own) > 1 and own[1].isdigit() else None,
        "bus": bus.split(" ")[0].lower(),
        "power_w": float(power) if power else None,
        "memory_mb": memory,
        "hbm_mb": hbm,
    }


def _process(cells: list[list[str]], processes: list[dict[str, Any]]) -> None:
    if len(cells) < 4 or not cells[0] or not cells[1] or not cells[0][0].isdigit() or not cells[1][0].isdigit():
        return
    memory = cells[3][0] if cells[3] else ""
    processes.append(
        {
            "npu": int(cells[0][0][:9]),
            "pid": int(cells[1][0][:12]),
            "name": " ".join(cells[2]),
            "memory_mb": int(memory[:12]) if memory.isdigit() else None,
        }
    )


def fields(text: str) -> dict[str, str]:
    """`label : value` lines of the `-t` forms; the first of a repeated label wins."""
    found: dict[str, str] = {}
    for line in clean(text).splitlines():
        match = re.match(r"\s*(\S.*?)\s+:\s?(.*)$", line)
        if match:
            found.setdefault(match.group(1), match.group(2).strip())
    return found


def board(text: str) -> dict[str, str] | None:
    """`npu-smi info -t board`: driver, firmware, compatibility word, PCI device, SoC name as the runtime spells it."""
    found = fields(text)
    if "NPU ID" not in found:
        return None
    return {
        "driver": found.get("Software Version", ""),
        "firmware": found.get("Firmware Version", ""),
        "compatibility": found.get("Compatibility", ""),
        "pci_device": found.get("PCI Device ID", "").lower().replace("0x", ""),
        "soc": soc(found),
    }


def soc(found: dict[str, str]) -> str:
    """`Ascend` + `910B2C`, `Ascend910` + `_` + `9382`, `Ascend950PR` + `_` + `9579`; '' when the fields do not say."""
    kind, chip, npu = (found.get(k, "") for k in ("Chip Type", "Chip Name", "NPU Name"))
    if kind and chip:
        return kind + chip
    return chip + "_" + npu if chip and npu not in ("", "NA") else ""


def health(text: str) -> dict[str, Any] | None:
    """`npu-smi info -t health`: status and the list of error codes."""
    found = fields(text)
    status = found.get("Health Status")
    if not status:
        return None
    codes = found.get("Error Code", "NA")
    return {"status": status, "codes": [] if codes == "NA" else codes.split()}


def mapping(text: str) -> list[dict[str, Any]]:
    """`npu-smi info -m`: one dict per chip, keys from the header; rows of the management unit `Mcu` are left out."""
    lines = [line for line in clean(text).splitlines() if line.strip()]
    if not lines or "NPU ID" not in lines[0]:
        return []
    header = re.split(r"\s{2,}", lines[0].strip())
    rows = []
    for line in lines[1:]:
        cells = re.split(r"\s{2,}", line.strip())
        row = dict(zip(header, cells))
        if len(cells) == len(header) and row.get("Chip Name") != "Mcu":
            rows.append({k: int(v[:9]) if v.isdigit() else v for k, v in row.items()})
    return rows


def listing(text: str) -> list[int]:
    """`npu-smi info -l`: NPU ids."""
    return [int(n) for n in re.findall(r"^\s*NPU ID\s+:\s*(\d{1,9})\s*$", clean(text), re.M)]
