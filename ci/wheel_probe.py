"""Given the names of the files in csrc/cpu: whether the kvbackend that is installed runs their kernels.

The samples of every op are called as a user calls it. Automatic choice must name the CPU backend, and torch's profiler
must see a native kernel in the call. Under a torch that is too old for the kernels the reference must run, for that
reason.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import kvbackend
from kvbackend import dispatch, native
from kvbackend.ops import registry


def main(files: list[str]) -> None:
    """Print what runs, or end with what is wrong."""
    library = native.library("cpu")
    old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < native.MIN_TORCH
    warnings.simplefilter("ignore", dispatch.FallbackWarning)
    chosen, ops = {}, sorted(set(files) & registry.keys())
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for op in ops:
            for _, sample in registry[op].make_samples("cpu", torch.bfloat16):
                chosen.setdefault(op, dispatch.explain(op, **sample).chosen)
                with record_function(op):
                    registry[op](**sample)
    ran = set()
    for event in seen.events():
        parent = event if event.name.startswith("kvbackend_native::") else None
        while parent is not None and parent.name not in ops:
            parent = parent.cpu_parent
        if parent is not None:
            ran.add(parent.name)
    print(f"{kvbackend.__file__}: Python {sys.version.split()[0]}, torch {torch.__version__}")
    want = "reference" if old else "cpu"
    wrong = [op for op in ops if chosen[op] != want or (op in ran) == old]
    if wrong or bool(library.reason) != old:
        raise SystemExit(f"not run by {want}: {', '.join(wrong) or 'none'}; the library: {library.reason or 'loaded'}")
    print(library.reason if old else f"{len(ops)} ops ran their {library.isa} kernels; {native.build_facts()['build']}")


main(sys.argv[1:])
