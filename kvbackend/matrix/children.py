"""Run cells in child processes: one that crashes or hangs is a cell's verdict, and the rest goes on in the next."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import torch

from .. import backends
from ..ops import registry
from . import judge
from .judge import Cell, Key
from .worker import MAKING

START_SECONDS = 300.0  # for a process to begin: torch is loaded
CELL_SECONDS = 300.0  # for one cell, compiling its kernel included
MAX_CRASHES = 8  # of one group, after which what is left of it stays untested
QUICK_OPS = 10  # of one process: starting one takes longer than its cells


@dataclass
class Group:
    """What one child runs: ops x backends x dtypes of a device."""

    ops: list[str]
    backends: list[str]
    device: str
    dtypes: list[str]
    quick: bool
    done: list[Key] = field(default_factory=list)

    def turns(self) -> int:
        """How often it makes samples: ops x backends x dtypes."""
        return len(self.ops) * len(self.backends) * len(self.dtypes)

    def planned(self) -> Iterator[Key]:
        """The cells to expect. Sample names are those of tensors without data; a device may have a few more."""
        for op in self.ops:
            for backend in self.backends:
                for dtype in self.dtypes:
                    samples = registry[op].make_samples("meta", getattr(torch, dtype))
                    for sample, args in judge.quick_samples(samples) if self.quick else samples:
                        yield Key(op, backend, self.device, dtype, judge.format_of(args), sample)


def groups(ops: Sequence[str], only_backends: Sequence[str] | None, devices: Iterable[str], quick: bool) -> list[Group]:
    """A group for each op and device; quick: for some ops at once."""
    size = QUICK_OPS if quick else 1
    return [
        Group(list(ops[i : i + size]), names, device, [judge.name_of(dtype) for dtype in judge.DTYPES], quick)
        for device in devices
        if (names := judge.served(device, only_backends))
        for i in range(0, len(ops), size)
    ]


def run(
    group: Group, step: Callable[[Key], object] = lambda key: None, seconds: float = CELL_SECONDS
) -> Iterator[Cell]:
    """Run a group in as many children as it takes, and yield its cells as they come.

    step      is told of each cell that begins, and of each time that samples are made
    seconds   that one cell may take
    """
    crashes = 0
    while True:
        with _Child(group) as child:
            yield from child.cells(step, seconds)
        if child.told_end:
            return
        if child.begun is None:
            continue  # it ended by itself past a cell that left its device unusable
        crashes += 1
        key = child.begun
        group.done.append(key)
        yield Cell(**asdict(key), status="crashed", reasons=(child.last_words(seconds),))
        if crashes == MAX_CRASHES:
            yield from _untested(group, f"not run: {crashes} processes ended at cells of {', '.join(group.ops)}")
            return
        if key.sample == MAKING:
            yield from _untested(group, "not run: its process ended while samples were made", key.turn)


def _untested(group: Group, why: str, turn: tuple[str, ...] | None = None) -> Iterator[Cell]:
    """The cells that are left, of one turn or of all."""
    for key in group.planned():
        if key not in group.done and turn in (None, key.turn):
            yield Cell(**asdict(key), status="untested", reasons=(why,))


def asked(
    ops: Iterable[str], only_backends: Sequence[str] | None, devices: Iterable[str], quick: bool
) -> Iterator[Cell]:
    """What the backends of devices that are not among `devices` say of every sample; nothing runs."""
    kinds = {torch.device(device).type for device in devices} | {None}
    absent = [backend for backend in backends.registered().values() if backend.device not in kinds]
    absent = [backend for backend in absent if only_backends is None or backend.name in only_backends]
    for name in ops if absent else ():
        calls = [
            (dtype, *sample)
            for dtype in judge.DTYPES
            for samples in [registry[name].make_samples("meta", dtype)]
            for sample in (judge.quick_samples(samples) if quick else samples)
        ]
        yield from (judge.ask_cell(registry[name], backend, *call) for backend in absent for call in calls)


class _Child:
    """One worker in a process group of its own, which is killed as a whole at the end, whatever happened."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.begun: Key | None = Key(group.ops[0], group.backends[0], group.device, group.dtypes[0], "", MAKING)
        self.told_end = self.too_late = False  # it had finished; it was silent for too long

    def __enter__(self) -> _Child:
        self._pipe, write = os.pipe()
        os.set_blocking(self._pipe, False)
        self._output: IO[bytes] = tempfile.TemporaryFile()
        paths = [path or os.getcwd() for path in sys.path]  # what can be imported here can be there
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbackend.matrix.worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            # threads that wait would spin: beside others that work, the cells took five times as long
            env={"OMP_WAIT_POLICY": "passive"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
            pass_fds=(write,),
        )
        os.close(write)
        assert self._process.stdin is not None
        with self._process.stdin as stdin, contextlib.suppress(BrokenPipeError):  # it ended at once: a crash
            stdin.write(json.dumps(asdict(self.group)).encode())
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if not (self.told_end or self.too_late or error):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)  # for its exit code
        with contextlib.suppress(ProcessLookupError, PermissionError):  # everything in the group has ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._pipe)
        self._output.seek(0)
        self._said = self._output.read().decode("utf-8", "replace")
        self._output.close()

    def cells(self, step: Callable[[Key], object], seconds: float) -> Iterator[Cell]:
        """The cells that the child tells, until it ends or says nothing for too long."""
        for message in self._messages(seconds):
            if "end" in message:
                self.told_end = True
            elif "begin" in message:
                self.begun = Key(**message["begin"])
                step(self.begun)
            else:
                assert self.begun is not None
                self.group.done.append(self.begun)
                self.begun = None
                yield cell_of(message["cell"])

    def _messages(self, seconds: float) -> Iterator[dict[str, Any]]:
        waiting, deadline = b"", time.monotonic() + START_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            ended = self._process.poll() is not None  # asked first: what it said before is read below
            if not select.select([self._pipe], [], [], 0 if ended else min(left, 0.2))[0]:
                if ended:  # and what it started holds the pipe open
                    return
                continue
            chunk = os.read(self._pipe, 1 << 16)
            if not chunk:
                return
            *lines, waiting = (waiting + chunk).split(b"\n")
            for line in lines:
                yield json.loads(line)
                deadline = time.monotonic() + seconds
        self.too_late = True

    def last_words(self, seconds: float) -> str:
        """How the child ended, and the line of its output that says most."""
        code = self._process.returncode
        if self.too_late:
            return f"nothing came back in {seconds:g} seconds: its process was killed"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = [line.strip() for line in self._said.splitlines() if line.strip()]
        telling = [line for line in lines if re.match(r"Fatal|terminate called|[\w.]*(Error|Exception)\b", line)]
        said = (telling or lines[-1:] or ["it said nothing"])[0]
        return f"its process ended with {how}: {said}"


def cell_of(found: dict[str, Any]) -> Cell:
    """A cell from what `Cell.to_dict` gave."""
    return Cell(**{**found, "reasons": tuple(found["reasons"])})
