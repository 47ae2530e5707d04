"""A stand-in for CANN's package of torch ops: its published schemas, defined by `torch.library`, over
`tests/npu/cann_vendor.py`. The dispatcher itself binds the calls.

It proves that calls fit a state of the package and what the documentation allows. It proves nothing about Ascend.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from kvbackend.backends.npu.cann_ops import PACKAGE
from kvbackend.backends.npu.target import snapshots
from tests.doubles.torch_npu import bind
from tests.npu import cann_vendor

NEWEST = -1


def define(state: int = NEWEST) -> torch.library.Library:
    """Register the ops in a state of the package, 0 for the oldest; they are there as long as the library lives."""
    library = torch.library.Library(PACKAGE, "DEF")
    for name, states in snapshots()[PACKAGE].items():
        schema = states[state if state < len(states) else NEWEST]["schema"]
        library.define(schema)
        library.impl(name, _runs(name, torch._C.parse_schema(schema)), "CompositeExplicitAutograd")
    return library


def _runs(name: str, schema: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = bind(schema, args, kwargs)
        devices = {value.device for value in bound.values() if isinstance(value, torch.Tensor)}
        result = cann_vendor.OPERATORS[name](**tree_map_only(torch.Tensor, torch.Tensor.cpu, bound))
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(*devices), result)

    return run


def module() -> types.ModuleType:
    """For `sys.modules`."""
    return types.ModuleType(PACKAGE)
