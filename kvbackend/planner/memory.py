"""Sizes as people write them, the table of devices, and what of a device's memory is left for a cache."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

GIB = 1 << 30
_BYTE_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

# Bits of one stored weight, block scales included.
WEIGHT_BITS = {
    "fp32": Fraction(32), "bf16": Fraction(16), "fp16": Fraction(16), "fp8": Fraction(8), "int8": Fraction(8),
    "int4": Fraction(4), "mxfp4": Fraction(17, 4), "nvfp4": Fraction(9, 2),
}  # fmt: skip


def parse_bytes(value: int | str, argument: str, *, least: int = 1 << 20) -> int:
    """Bytes from a number, or from text with a unit: "80GiB" (2^30), "80GB" (10^9), "80G" (2^30)."""
    size = value if isinstance(value, int) else _parse(value, _BYTE_UNITS, argument, "80GiB, 80GB or bytes")
    if size < least:
        raise ArgumentError(
            f"{argument} is {value!r}, {size} bytes; it must be {least} bytes or more: write the unit, as in 80GiB"
        )
    return size


def parse_count(value: int | str, argument: str) -> int:
    """A count from a number, or from text with a unit: "8B" (10^9), "671B", "135M"."""
    count = value if isinstance(value, int) else _parse(value, _COUNT_UNITS, argument, "8B, 135M or a number")
    if count < 1:
        raise ArgumentError(f"{argument} is {value!r}; it must be 1 or more: write it as 8B, 135M or a number")
    return count


def _parse(text: str, units: dict[str, int], argument: str, example: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in units:
        raise ArgumentError(f"{argument} is {text!r}; it must be a positive size: write it as {example}")
    return int(Fraction(match[1]) * units[match[2]])


@dataclass(frozen=True)
class Device:
    """One accelerator, or one host. kind: "gpu", "npu", "shared" (CPU and GPU in one memory) or "cpu"."""

    name: str
    kind: str
    memory_bytes: int
    bandwidth: Fraction | None = None
    source: str = "given"

    @property
    def default_margin(self) -> Fraction:
        """Part of the memory that stays free: fragmentation, the runtime, other processes."""
        return {"cpu": Fraction(0), "shared": Fraction(1, 5)}.get(self.kind, Fraction(1, 10))

    @property
    def system_bytes(self) -> int:
        """What a host keeps for its system, so that it does not swap: an eighth, from 8 to 16 GiB."""
        return min(max(self.memory_bytes // 8, 8 * GIB), 16 * GIB) if self.kind == "cpu" else 0


# Part of the memory that activations and workspaces take, unless the caller knows better.
DEFAULT_ACTIVATIONS = Fraction(1, 20)


def device_names() -> tuple[str, ...]:
    """Names of the devices in the table, without aliases."""
    return tuple(_device_table())


def find_device(name: str) -> Device:
    """A device of the table. Raises ArgumentError, listing the table, for a name that is not in it."""
    wanted = name.lower()
    table = _device_table()
    found = next((key for key, row in table.items() if wanted in (key, *row.get("aliases", ()))), None)
    if found is None:
        raise ArgumentError(
            f"device is {name!r}; it must be one of {', '.join(table)}: choose one, or give memory and bandwidth"
        )
    row = table[found]
    bandwidth = row["bandwidth_gb_per_s"]
    return Device(
        found,
        row["kind"],
        row["memory_mib"] << 20,
        None if bandwidth is None else Fraction(str(bandwidth)) * 10**9,
        f"{row['source']} ({row['date']})",
    )


@cache
def _device_table() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("devices.json").read_text("utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


@dataclass(frozen=True)
class Parallel:
    """How a model is spread: tensor x pipeline devices, experts over `expert` devices of a stage.

    With expert > tensor a stage has expert / tensor data-parallel copies of the attention, which share one set of
    experts; each copy serves sequences of its own.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}_parallel is {getattr(self, name)}; it must be 1 or more: fix it")
        if self.expert % self.tensor and self.tensor % self.expert:
            raise ArgumentError(
                f"expert_parallel is {self.expert} and tensor_parallel is {self.tensor}; one must divide the other: "
                f"choose a multiple of {self.tensor}"
            )

    @property
    def replicas(self) -> int:
        """Copies of the attention, each with sequences of its own."""
        return max(1, self.expert // self.tensor)

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.pipeline * self.tensor * self.replicas


@dataclass(frozen=True)
class Weights:
    """Bytes of all weights and of the routed experts among them, and `active` bytes that one token reads.

    `label` says how the total came about; `active` is None if unknown.
    """

    total: int
    label: str
    experts: int = 0
    active: int | None = None

    def on_device(self, parallel: Parallel, stage: Fraction) -> int:
        """Bytes on one device of a pipeline stage that holds the part `stage` of the layers."""
        dense = Fraction(self.total - self.experts, parallel.tensor)
        experts = Fraction(self.experts, max(parallel.tensor, parallel.expert))
        return -int(-(dense + experts) * stage // 1)

    def read_on_device(self, parallel: Parallel, stage: Fraction) -> Fraction | None:
        """Bytes that a decode step reads there at least; None if that is unknown."""
        if self.active is None:
            return None
        return Fraction(self.active, max(parallel.tensor, parallel.expert)) * stage
