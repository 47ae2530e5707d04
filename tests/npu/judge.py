"""Run an adapter as dispatch would, and compare with the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvbackend import backends
from kvbackend.matrix import TOLERANCES, copy_arguments, difference, flat_results, in_float64
from kvbackend.ops import registry

NPU = backends.registered()["npu"]
ADAPTED = [name for name in sorted(registry) if NPU.adapter(name) is not None]
OWN = ("copy_blocks", "swap_blocks")  # of our own library, csrc/npu; the others call torch_npu, or torch
CALLING = [name for name in ADAPTED if name not in OWN]


def reasons(op: str, args: Mapping[str, Any]) -> list[str]:
    """The adapter's own reasons, without the machine's."""
    bound = registry[op].bind((), args)
    registry[op].validate(bound)
    return list(NPU.adapter(op).unsupported(**registry[op].dispatcher.views(bound)))


def run(op: str, args: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the adapter returns and writes."""
    got = registry[op].bind((), copy_arguments(args))
    return flat_results(registry[op], NPU.adapter(op).run(**got), got)


def faults(op: str, args: Mapping[str, Any], got: Mapping[str, Tensor]) -> list[str]:
    """Where results differ from the reference by more than the contract allows."""
    spec = registry[op]
    wanted = spec.bind((), in_float64(spec, args))
    want = flat_results(spec, spec.reference(**wanted), wanted)
    found = []
    for name, tensor in got.items():
        apart = difference(tensor, want[name].to(tensor.dtype))
        allowed = 0.0 if spec.exact else TOLERANCES.get(tensor.dtype, 0.0)
        if not apart <= allowed:
            found.append(f"{name} differs by {apart:.3g}; allowed {allowed:.3g}")
    return found


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
