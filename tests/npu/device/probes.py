"""What an NPU answers beyond the contract: which operators its CANN has, and what it does past documented limits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvbackend.backends.npu import cann_ops, target, vendor_ops
from kvbackend.errors import ArgumentError
from kvbackend.ops import registry
from tests.npu import cases, judge
from tests.npu.device.moving import moved
from tests.npu.violations import TOO_LARGE_FOR_HOST, WALK, walk


def operators() -> Iterator[tuple[str, str | None]]:
    """Each aclnn operator of the vendor ops that this product has, and the library that exports it, if any."""
    family = target.current().family
    for op in vendor_ops.ALL:
        for name in op.aclnn if family in op.cann else ():
            yield name, cann_ops.exporting(name)


def limits() -> Iterator[tuple[str, str]]:
    """Calls just past each documented limit, forced past our predicates: what the call was, and how it was refused.

    The second text is empty where it was taken: then the documentation, or our reading of it, is stricter than CANN.
    """
    for vendor_op, limit, value in walk(target.current().family):
        for op, sizes in WALK[vendor_op.name, limit.name] if limit.name not in TOO_LARGE_FOR_HOST else ():
            try:
                call = registry[op].bind((), getattr(cases, op)(**sizes(value)))
                registry[op].validate(call)
            except ArgumentError:  # no backend takes such a call
                continue
            refusal = ""
            try:
                judge.NPU.adapter(op).run(**moved(call, "npu:0"))
                torch.npu.synchronize()  # an error behind the call shows here
            except RuntimeError as error:
                refusal = str(error).splitlines()[0]
            yield f"{vendor_op.name}: {limit.name} is {value} ({op})", refusal
