"""Times of the hot calls on an NPU, as percents of a copy and of a matmul that are measured beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbackend import backends
from kvbackend.ops import registry
from tests import device_times
from tests.cuda_triton import gpu_check, shapes
from tests.npu.device.moving import moved


def rows(dry: bool) -> Iterator[dict[str, Any]]:
    """A row for each hot call: its time on the first backend that takes it, or why none does."""
    copy, matmul = device_times.ceilings("npu:0", dry)
    yield dict(copy_gbs=copy, cube_tflops=matmul)
    for op, case, call in (shapes.SMALL if dry else shapes.FULL).calls():
        args = registry[op].bind((), gpu_check.materialize(as_ascend_has_it(call), "cpu"))
        adapter, name, reasons = taker(op, args)
        row: dict[str, Any] = dict(op=op, case=case)
        if adapter is None:
            yield row | dict(refused=reasons)
            continue
        on_device = moved(args, "npu:0")
        taken = device_times.median_us(lambda run=adapter.run, held=on_device: run(**held), "npu:0", dry)
        gbs, operations = gpu_check.traffic(op, args) / taken / 1e3, gpu_check.flops(op, args)
        row |= dict(backend=name, median_us=taken, gbs=gbs, percent_of_copy=100 * gbs / copy)
        if operations:
            tflops = operations / taken / 1e6
            row |= dict(tflops=tflops, percent_of_cube=100 * tflops / matmul)
        yield row


def as_ascend_has_it(call: dict[str, Any]) -> dict[str, Any]:
    """The call with caches of their own, weights in 16 bits and rows as they are cached."""
    changed = {name: value.contiguous() for name, value in call.items() if "cache" in name and value is not None}
    if "weights" in call:
        changed["weights"] = call["weights"].bfloat16()
    if "out_format" in call:
        changed["out_format"] = "auto"
    return call | changed


def taker(op: str, args: dict[str, Any]) -> tuple[Any, str, list[str]]:
    """The adapter that serves a call on this machine and its backend's name, or the reasons of all."""
    reasons: list[str] = []
    for backend in backends.serving("npu"):
        adapter, missing = backend.adapter(op), backend.missing()
        if adapter is None or missing:
            reasons += [f"{backend.name}: {reason}" for reason in missing or (backend.absence(op),)]
            continue
        refused = list(adapter.unsupported(**registry[op].dispatcher.views(args)))
        if not refused:
            return adapter, backend.name, []
        reasons += [f"{backend.name}: {reason}" for reason in refused]
    return None, "", reasons


def line(row: dict[str, Any]) -> str:
    if "op" not in row:
        return f"a copy moves {row['copy_gbs']:.0f} GB/s, a matmul does {row['cube_tflops']:.1f} TFLOP/s in bfloat16"
    what = f"{row['op']}, {row['case']}"
    if "refused" in row:
        return f"{what}: not timed: {row['refused'][0]}"
    cube = f", {row['tflops']:.1f} TFLOP/s, {row['percent_of_cube']:.0f} % of cube" if "tflops" in row else ""
    return (
        f"{what}: {row['median_us']:.0f} us by {row['backend']}, {row['gbs']:.0f} GB/s, "
        f"{row['percent_of_copy']:.0f} % of copy{cube}"
    )
