"""The process that runs a group of cells: `python -m kvbackend.matrix.worker PIPE`, the group as JSON on stdin.

It says on the pipe, a JSON document a line, which cell it begins and what came of it, so that `children` knows which
one a crash belongs to. Past a cell that left the device unusable it ends; `children` starts another for the rest.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import select
import signal
import sys
import threading
import warnings
from dataclasses import asdict, replace
from typing import Any

import torch

from .. import backends
from ..dispatch import FallbackWarning
from ..ops import registry
from . import judge
from .judge import Key

MAKING = "making the samples"  # stands for the sample's name until there are samples


def main(pipe: int) -> int:
    """Run the group; exit code 0 where every cell had its turn."""
    faulthandler.enable()  # a fatal signal says on stderr where
    threading.Thread(target=end_with_the_reader, args=(pipe,), daemon=True).start()
    warnings.simplefilter("ignore", FallbackWarning)
    group = json.load(sys.stdin)
    done = {Key(**key) for key in group["done"]}
    for backend in backends.registered().values():
        backend.missing()  # a backend loads what makes its devices known to torch

    def say(**message: Any) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    @functools.lru_cache(len(group["dtypes"]))  # those of one op, which every backend in turn is judged by
    def cases(op: str, dtype: torch.dtype) -> list[judge.Case]:
        return judge.cases_of(registry[op], group["device"], dtype, group["quick"])

    def turn(op: str, backend: str, dtype: torch.dtype) -> bool:
        """The cells of one op, backend and dtype; False past one after which nothing can run."""
        making = Key(op, backend, group["device"], judge.name_of(dtype), "", MAKING)
        if making in done:
            return True
        say(begin=asdict(making))
        for sample, args, expected in cases(op, dtype):
            key = replace(making, format=judge.format_of(args), sample=sample)
            if key not in done:
                say(begin=asdict(key))
                cell = judge.run_cell(registry[op], backend, group["device"], dtype, sample, args, expected)
                say(cell=cell.to_dict())
                if cell.status == "fail" and cell.max_error is None and not usable(group["device"]):
                    return False
                say(begin=asdict(making))  # an end between two cells is told as the end of neither
        return True

    for op in group["ops"]:
        for backend in group["backends"]:
            for name in group["dtypes"]:
                if not turn(op, backend, getattr(torch, name)):
                    return 1
    say(end=True)
    return 0


def end_with_the_reader(pipe: int) -> None:
    """Kill this process group once nobody reads the pipe: who started it has ended, however that came about."""
    reader = select.poll()
    reader.register(pipe, 0)
    reader.poll()
    os.killpg(0, signal.SIGKILL)


def usable(device: str) -> bool:
    """Whether the device still computes in this process; after a fault of a kernel it may not."""
    try:
        return bool((torch.ones(1, device=device) + 1).cpu() == 2)
    except RuntimeError:
        return False


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
