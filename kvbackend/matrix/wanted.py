"""The combinations of device and versions that ought to be tested: `ci/matrix.toml`, and which runs cover them.

[[wanted]]
device = "npu"          # cpu, cuda or npu
arch = "Ascend950PR"    # of the CPU, sm_XY of the GPU, the beginning of the SoC's name
python = "3.11"
torch = "2.12.0"
torch_npu = "2.12.0.post2"
cann = "9.1.0"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..compat import rules, versions
from ..compat.rules import Ruling
from ..errors import ArgumentError
from ..profile import toml
from .merge import Run

# device type -> what a row of it names, besides device and arch
VERSIONS = {
    "cpu": ("python", "torch"),
    "cuda": ("python", "torch", "cuda", "triton"),
    "npu": ("python", "torch", "torch_npu", "cann"),
}
Row = dict[str, str]


def read(path: str) -> list[Row]:
    """The rows of the file; a row whose versions are lists stands for each of their combinations."""
    try:
        found = toml().loads(Path(path).read_text(encoding="utf-8")).get("wanted")
    except (OSError, ValueError) as error:  # a TOMLDecodeError is a ValueError
        raise ArgumentError(
            f"{path} cannot be read ({error}); --wanted takes a TOML file as ci/matrix.toml: name one"
        ) from error
    if not isinstance(found, list) or not found:
        raise ArgumentError(f"{path} has no [[wanted]]; each is one wanted combination: add one")
    return [row for number, entry in enumerate(found, 1) for row in _rows(entry, f"[[wanted]] {number} of {path}")]


def _rows(entry: Any, where: str) -> list[Row]:
    device = entry.get("device") if isinstance(entry, dict) else None
    if not isinstance(device, str) or device not in VERSIONS:
        raise ArgumentError(f"{where} has device {device!r}; it must be one of {', '.join(VERSIONS)}: name one")
    names = {"device", "arch", *VERSIONS[device]}
    if entry.keys() != names:
        raise ArgumentError(
            f"{where} names {', '.join(sorted(entry))}; for {device} it must name {', '.join(sorted(names))}: "
            f"correct it"
        )
    choices = [value if isinstance(value, list) else [value] for value in entry.values()]
    for name, choice in zip(entry, choices, strict=True):
        if not choice or not all(isinstance(value, str) and value for value in choice):
            raise ArgumentError(
                f"{where} has values that are no text or empty: {name} is {entry[name]!r}; it must be a text or a list "
                f"of texts: quote it, or name one"
            )
    return [dict(zip(entry, chosen, strict=True)) for chosen in product(*choices)]


def rulings(row: Mapping[str, str]) -> list[Ruling]:
    """What the compatibility matrix says of a row."""
    found = [rules.python_torch(row["python"], row["torch"])]
    if row["device"] == "cuda":
        found += [rules.cuda_arch(row["arch"], row["cuda"]), rules.torch_triton(row["torch"], row["triton"])]
        found += [_torch_cuda(row["torch"], row["cuda"])]
    if row["device"] == "npu":
        found += [
            rules.torch_npu_torch(row["torch"], row["torch_npu"]),
            rules.torch_npu_cann(row["torch_npu"], row["cann"]),
            *_soc(row),
        ]
    return found


def _torch_cuda(torch: str, cuda: str) -> Ruling:
    """Whether the default wheel of torch is built for this CUDA release."""
    row = rules.shipped().row("torch_cuda", torch) or {"cuda": "none known"}
    if _same("cuda", row["cuda"], cuda):
        return Ruling("ok")
    return Ruling("bad", f"torch {torch} with CUDA {cuda}; its wheel is built for CUDA {row['cuda']}: write that")


def _soc(row: Mapping[str, str]) -> list[Ruling]:
    """Whether the chip is known, and new enough software for it; most chips have no oldest release."""
    arch = row["arch"]
    if rules.soc_row(arch) is None:
        chips = ", ".join(known["soc"] for known in rules.shipped().rows("soc"))
        return [Ruling("bad", f"arch is {arch}; the chips of the compatibility matrix are {chips}: write one of these")]
    stated = rules.soc_cann(arch, row["cann"]), rules.soc_torch_npu(arch, row["torch_npu"])
    return [ruling for ruling in stated if ruling.state != "unknown"]


def covering(row: Mapping[str, str], runs: Sequence[Run]) -> list[int]:
    """The numbers of the runs on that device with those versions, whatever they found."""
    return [number for number, run in enumerate(runs, 1) if _covers(row, run.head)]


def _covers(row: Mapping[str, str], head: Mapping[str, Any]) -> bool:
    chip, have = head["chips"].get(row["device"]), head["versions"]
    return (
        chip is not None
        and chip["arch"].startswith(row["arch"])
        and all(_same(name, row[name], have.get(name, "")) for name in VERSIONS[row["device"]])
    )


def _same(name: str, wanted: str, have: str) -> bool:
    if name in ("python", "cuda"):  # torch tells of CUDA the first two numbers
        return have.split(".")[:2] == wanted.split(".")[:2]
    return versions.parse(wanted) is not None and versions.parse(have) == versions.parse(wanted)
