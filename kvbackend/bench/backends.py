"""What choosing costs on top of a plain `torch.ops` call, and each op's production sample on every backend."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from .. import backends
from ..dispatch import use
from ..matrix import copy_arguments
from ..native import missing
from ..ops import registry
from ..spec import NATIVE_NAMESPACE
from .timing import Result, interleaved, result_of


def dispatch_overhead(names: Iterable[str] = ("reshape_and_cache", "paged_attention")) -> list[Result]:
    """Automatic choice and a resolved callable against the plain call of the same native kernel."""
    results = []
    for name in names:
        op = registry[name]
        args = dict(op.make_samples("cpu", torch.bfloat16))["decode"]
        if list(missing(op, "cpu")):
            continue
        values = tuple(op.bind((), args).values())
        plain, resolved = getattr(getattr(torch.ops, NATIVE_NAMESPACE), name).default, op.resolve(**args)
        candidates: dict[str, Callable[..., Any]] = {
            "plain torch.ops call": plain,
            "automatic": op,
            "resolved": resolved,
        }
        with torch.no_grad():
            times = interleaved({case: partial(function, *values) for case, function in candidates.items()})
        base = times["plain torch.ops call"]
        for case, samples in times.items():
            over = statistics.median(a - b for a, b in zip(samples, base, strict=True))
            results.append(result_of(name, f"dispatch: {case}", torch.bfloat16, "cpu", samples, over))
    return results


def op_times(names: Iterable[str], device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[Result]:
    """Each op's production sample on every backend of the device that takes it, the reference among them."""
    results = []
    for name in names:
        op = registry[name]
        samples = dict(op.make_samples(device, dtype))
        args = samples.get("production") or next(iter(samples.values()))
        candidates = {}
        for backend in [*(found.name for found in backends.serving(torch.device(device).type)), backends.REFERENCE]:
            own = copy_arguments(args)
            try:
                with use(backend, ops=name):
                    resolved = op.resolve(**own)
            except RuntimeError:  # refused: `explain` tells why
                continue
            candidates[backend] = partial(resolved, **own)
        with torch.no_grad():
            for backend, times in interleaved(candidates).items():
                results.append(result_of(name, "production sample", dtype, backend, times))
    return results
