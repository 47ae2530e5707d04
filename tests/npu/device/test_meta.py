"""Rung 2: our calls, as the double records them, bound by the real dispatcher and shaped by Huawei's Meta code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbackend.backends.npu import cann_ops, target
from kvbackend.backends.npu.target import Found, Target, snapshots
from tests.doubles.torch_npu import TorchNpu
from tests.npu import cases, judge

WITHOUT_META = {"npu_gather_pa_kv_cache", "npu_scatter_pa_cache"}  # torch_npu 2.13.0 has none


def recorded(op: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """The calls of the adapter over the double, with their arguments and results."""
    double = TorchNpu("2026-10")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "current", lambda: Target("950DT", "2026-10", "9.2.0"))
        patch.setattr(target, "found", lambda: Found(reasons=("a double is no machine",)))
        patch.setitem(sys.modules, "torch_npu", double)
        patch.setattr(cann_ops, "op", double.of_cann)
        for _, args in cases.every(op, torch.bfloat16):
            if not judge.reasons(op, args):
                judge.run(op, args)
    noted = zip(double.calls, double.results, strict=True)
    return ((name, bound, result) for (name, bound), result in noted if name.startswith("npu_"))


def on(device: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, list):
        return [on(device, item) for item in value]
    return value


def call(name: str, bound: dict[str, Any]) -> Any:
    """By keyword, through the dispatcher's own parser."""
    overloads = getattr(torch.ops.npu, name)
    return (overloads.value if name == "npu_scatter_pa_cache" else overloads.default)(**bound)


def described(result: Any) -> list[tuple[Any, ...]]:
    items = result if isinstance(result, tuple) else () if result is None else (result,)
    return [(tuple(item.shape), item.dtype) for item in items if item is not None and item.numel() > 1]


@pytest.mark.parametrize("op", [op for op in judge.CALLING if op != "project_out"])
def test_calls_bind_and_shapes_agree(op) -> None:
    seen = set()
    for name, bound, result in recorded(op):
        seen.add(name)
        arguments = {key: on("meta", value) for key, value in bound.items()}
        if name in WITHOUT_META:
            with pytest.raises(NotImplementedError):
                call(name, arguments)
            continue
        assert described(call(name, arguments)) == described(result), name
        with FakeTensorMode():
            fake = {key: on("npu:0", value) for key, value in bound.items()}
            assert described(call(name, fake)) == described(result), name
    assert seen


def test_installed_schemas_are_those_of_the_snapshot() -> None:
    for name, variants in snapshots()["schemas"].items():
        base, _, overload = name.partition(".")
        live = getattr(getattr(torch.ops.npu, base), overload or "default")._schema
        assert str(live).removeprefix("npu::") == str(torch._C.parse_schema(variants[-1]["schema"])), name
