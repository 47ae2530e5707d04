"""Captured graphs: replays read what the tensors hold then, and host lengths are what the graph was last told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import kvbackend
from kvbackend.backends.npu import host_lengths
from kvbackend.matrix import copy_arguments, difference, flat_results
from kvbackend.ops import registry
from tests.npu import cases, judge
from tests.npu.device.moving import moved

ON_THE_HOST = ("paged_attention", "mla_attention")  # their lengths
WITHOUT_A_GRAPH = {
    "swap_blocks": "its pairs are read on the host",
    "copy_blocks": "its pairs are read on the host",
    "shared_kv_attention": "it waits for the device, and the double of CANN's package computes in Python",
}


def faults() -> Iterator[tuple[str, str]]:
    """Each op that torch_npu serves and what is wrong with a replay; empty: nothing."""
    for op in judge.ADAPTED:
        taken = (args for _, args in cases.every(op, torch.bfloat16) if not judge.reasons(op, args))
        if op in WITHOUT_A_GRAPH or (args := next(taken, None)) is None:
            continue
        try:
            yield op, of_host_lengths(op) if op in ON_THE_HOST else of_values(op, args)
        except RuntimeError as error:
            yield op, str(error).splitlines()[0]


def compare(op: str, result: Any, args: dict[str, Any], want: dict[str, Tensor]) -> str:
    got = {name: tensor.cpu() for name, tensor in flat_results(registry[op], result, args).items()}
    apart = [name for name, tensor in got.items() if difference(tensor, want[name])]
    return f"a replay differs from the call itself in {', '.join(apart)}" if apart else ""


def eager(op: str, args: dict[str, Any]) -> dict[str, Tensor]:
    """On the device."""
    args = moved(registry[op].bind((), copy_arguments(args)), "npu:0")
    with kvbackend.use("npu", ops=op):
        result = registry[op](**args)
    return {name: tensor.cpu() for name, tensor in flat_results(registry[op], result, args).items()}


def captured(call: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """A graph of a call, which was made once before, and its result."""
    call()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = call()
    return graph, result


def of_values(op: str, args: dict[str, Any]) -> str:
    """Captured on other numbers, which are then replaced in place."""
    want = eager(op, args)
    args = registry[op].bind((), args)
    other = {
        name: value.flip(0) if isinstance(value, Tensor) and value.is_floating_point() and value.dim() else value
        for name, value in copy_arguments(args).items()
    }
    on_device = moved(other, "npu:0")
    with kvbackend.use("npu", ops=op):
        graph, result = captured(lambda: registry[op](**on_device))
    for name, value in args.items():
        if isinstance(value, Tensor):
            on_device[name].copy_(value)
    graph.replay()
    torch.npu.synchronize()
    return compare(op, result, on_device, want)


def of_host_lengths(op: str) -> str:
    """Captured with some lengths, told others."""
    first, second = (19, 9), (12, 3)  # tokens of two sequences of a query each
    args = getattr(cases, op)(torch.bfloat16, q_lens=(1, 1), seq_lens=first)
    on_device = moved(registry[op].bind((), copy_arguments(args)), "npu:0")
    with kvbackend.use("npu", ops=op):
        run = registry[op].resolve(**on_device)  # below dispatch, where torch_npu sees its own calls
    with host_lengths.given([0, 1, 2], first):
        graph, result = captured(lambda: run(**on_device), auto_dispatch_capture=True)
    for seq_lens in (second, first):
        graph.update(cpu_update_input=[dict(actual_seq_qlen=[1, 2], actual_seq_kvlen=list(seq_lens))])
        graph.replay()
        torch.npu.synchronize()
        wanted = eager(op, args | dict(seq_lens=torch.tensor(seq_lens, dtype=torch.int32)))
        if fault := compare(op, result, on_device, wanted):
            return f"{fault}, at lengths {seq_lens}"
    return ""
