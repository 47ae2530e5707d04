"""Lets triton-ascend compile what launchers launch, for Ascend chips that are not here.

A launcher is run on tensors of device 'meta' through triton-ascend's own jit, which finds a driver that names the chip
and starts nothing. The command that triton-ascend makes of a kernel is run as it is, with flags that only report. The
last step of bishengir-compile needs hivmc-a5 of CANN: that it is not found is the one end that passes, and what was
reached then is the kernel as optimised HIVM with every buffer placed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import ascendnpuir
import triton
import triton.backends.ascend.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import MLIRCompilationError

from kvbackend import backends
from kvbackend.backends.cuda_triton import launching
from kvbackend.backends.npu_triton import launching as ascend
from kvbackend.ops import registry

from .judging import LIMIT, faults, memory

TARGETS = ("Ascend950PR_9599", "Ascend950DT_9591")
BIN = Path(ascendnpuir.__path__[0], "bin")

ONE_TRY = ("--enable-tuning-mode",)  # else five, with the same result where nothing overflows

_run = subprocess.run  # before anything is put in its place


@dataclass(frozen=True)
class Built:
    """One kernel for one chip: KiB of each memory, or what is wrong with it."""

    name: str
    used: dict[str, float]
    faults: tuple[str, ...]


def judge(command: list[str], *flags: str) -> Built:
    """Run what compiles a kernel, with flags that do not change the result."""
    with tempfile.TemporaryDirectory() as folder:
        done = _run(
            [*command, *flags, "--enable-print-memory-allocated-size", f"--save-temps={folder}"],
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        hivm = Path(folder, "module.hivm.opt.mlir")
        text = hivm.read_text() if hivm.exists() else ""
    kernel = re.search(r"func\.func @(\w+)", Path(command[1]).read_text())
    assert kernel
    used = memory(text)
    return Built(kernel[1], used, tuple(faults(done.stdout + done.stderr, done.returncode, text, used)))


class Compiler:
    """Stands for the machine: what triton-ascend compiles is noted in `built`, and what it starts in `grids`."""

    def __init__(self, chip: str) -> None:
        self.chip = chip
        self.built: list[Built] = []
        self.grids: list[tuple[str, tuple[int, ...]]] = []

    # ------------------------------------------------------------------------- the driver, as triton-ascend asks it

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", self.chip, 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    @property
    def utils(self) -> Compiler:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int]:
        return 1, 1, 0, 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: self.grids.append((metadata.kernel_name, args[:3]))

    # ------------------------------------------------------------------------------------------------ the compiler

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        """subprocess.run of triton-ascend: a command that makes machine code is judged, and seems to have worked."""
        if not command[0].endswith("bishengir-compile") or "--help" in command:
            return _run(command, **options)
        found = judge(command, *ONE_TRY)
        if found.faults:
            found = judge(command)  # of one try alone it does not tell what was wrong
        self.built.append(found)
        Path(f"{command[-1]}.o").write_bytes(b"not a kernel")
        return subprocess.CompletedProcess(command, 0, b"", b"")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """What is launched meanwhile is compiled for the chip, and goes nowhere."""
        triton.runtime.driver.set_active(self)
        with (
            mock.patch.object(launching, "launch", self.start),
            mock.patch.object(triton.backends.ascend.compiler.subprocess, "run", self.run),
            mock.patch.dict("os.environ", PATH=str(BIN)),
            redirect_stdout(StringIO()),  # a warning for each kernel that it is not compiled for a 910
        ):
            yield

    def start(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """As `launching.launch` on an NPU, whatever device the tensors are on."""
        if 0 in grid:
            return
        try:
            ascend.start(kernel, grid, *args, **constants)
        except MLIRCompilationError as error:  # before the command that `run` judges
            told = [line for line in str(error).splitlines() if line and not line.startswith(("///", "[INFO]"))]
            self.built.append(Built(kernel.fn.__name__, dict.fromkeys(LIMIT, 0.0), (" ".join(told[:3]),)))

    def call(self, op_name: str, **example: Any) -> None:
        """Run the op's launcher on a call, whose tensors may be on 'meta'."""
        op, adapter = registry[op_name], backends.registered()["npu_triton"].adapter(op_name)
        assert adapter is not None
        bound = op.bind((), example)
        reasons = list(adapter.unsupported(**op.dispatcher.views(bound)))
        assert not reasons, f"{op_name} is refused: {reasons}"
        with self.installed():
            adapter.run(**bound)
