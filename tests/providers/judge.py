"""Run an adapter as dispatch would, on CPU tensors over a double, and compare with the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvbackend import backends
from kvbackend.matrix import copy_arguments, difference, flat_results
from kvbackend.ops import registry
from tests.npu.judge import DTYPES, faults  # the verdict on results is one for all libraries

__all__ = ["DTYPES", "PROVIDERS", "adapted", "faults", "reasons", "run"]
PROVIDERS = ("flash_mla", "deep_gemm", "flashinfer")


def adapted(provider: str) -> list[str]:
    """The ops that a provider has an adapter for."""
    return [name for name in sorted(registry) if backends.registered()[provider].adapter(name) is not None]


def reasons(provider: str, op: str, args: Mapping[str, Any]) -> list[str]:
    """The adapter's own reasons, without the machine's."""
    bound = registry[op].bind((), args)
    registry[op].validate(bound)
    return list(backends.registered()[provider].adapter(op).unsupported(**registry[op].dispatcher.views(bound)))


def run(provider: str, op: str, args: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the adapter returns and writes; what it must not write is as it was."""
    given = registry[op].bind((), args)
    got = registry[op].bind((), copy_arguments(args))
    found = flat_results(registry[op], backends.registered()[provider].adapter(op).run(**got), got)
    for name, value in given.items():
        if isinstance(value, Tensor) and name not in registry[op].mutates:
            assert not difference(got[name], value), f"{name} was written"
    return found
