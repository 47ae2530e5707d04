"""What the backend says about machines, and how it launches."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbackend import backends
from kvbackend.backends import npu_triton
from kvbackend.backends.cuda_triton import launching as launchers
from kvbackend.backends.npu.target import Found, Target
from kvbackend.backends.npu_triton import launching, limits
from kvbackend.ops import registry

PACKAGE = npu_triton.__name__
SERVED = [name for name in registry if backends.registered()["npu_triton"].adapter(name)]


def on(monkeypatch: pytest.MonkeyPatch, found: Found, triton_ascend: str | None) -> list[str]:
    """The reasons of a machine."""

    def version(name: str) -> str:
        if triton_ascend is None:
            raise metadata.PackageNotFoundError(name)
        return triton_ascend

    monkeypatch.setattr(npu_triton, "version", version)
    monkeypatch.setattr(npu_triton.target, "found", lambda: found)
    return list(npu_triton.missing())


@pytest.mark.parametrize("family", ["950PR", "950DT"])
def test_takes_a_950(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(monkeypatch, Found(Target(family, "2026-10", "9.1.0")), "3.2.0") == []


@pytest.mark.parametrize("family", ["910B", "910_93"])
def test_refuses_what_the_kernels_were_not_compiled_for(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (reason,) = on(monkeypatch, Found(Target(family, "2026-10", "9.1.0")), "3.2.0")
    assert reason.startswith(f"the NPU is an Ascend{family}; the Triton kernels were compiled for Ascend950PR")


@pytest.mark.parametrize(("version", "words"), [(None, "not installed"), ("3.1.0", "is 3.1.0"), ("3.4.0", "is 3.4.0")])
def test_refuses_another_triton_ascend(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (reason,) = on(monkeypatch, Found(Target("950PR", "2026-10", "9.1.0")), version)
    assert words in reason
    assert "pip install triton-ascend==3.2.0" in reason


def test_a_machine_without_npu_is_refused_for_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(monkeypatch, Found(reasons=("no NPU; one: buy",)), "3.2.0") == ["no NPU; one: buy"]


@pytest.mark.parametrize("name", SERVED)
def test_launchers_are_those_of_cuda(name: str) -> None:
    """So what tests/cuda_triton shows of values holds here."""
    assert import_module(f"{PACKAGE}.{name}").run is import_module(f"kvbackend.backends.cuda_triton.{name}").run


@pytest.mark.parametrize(
    ("kv_format", "number", "refused"),
    [
        ("nvfp4", 256, True),
        ("bf16/int4", 129, True),
        ("nvfp4", 128, False),
        ("fp8_e4m3", 256, False),
        ("auto", 256, False),
    ],
)
def test_refuses_wide_heads_of_four_bits(kv_format: str, number: int, refused: bool) -> None:
    reasons = list(limits.packed_heads(kv_format, q=number))
    assert [reason.startswith(f"q has heads of {number} numbers in {kv_format}; ") for reason in reasons] == [
        True
    ] * refused


@pytest.mark.parametrize(
    ("ascend", "dtype", "keys"), [(True, torch.bfloat16, 32), (True, torch.float32, 16), (False, torch.bfloat16, 16)]
)
def test_steps_of_16_keys_are_of_float32_alone(
    ascend: bool, dtype: torch.dtype, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "compiles", lambda: ascend)
    assert launchers.keys_at_a_time(16, dtype) == keys
    assert launchers.keys_at_a_time(64, dtype) == 64


class Recorder:
    """A kernel that notes how it is started."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> None:
            self.seen = grid, args, constants, os.environ.get(launching.EVERY_GRID)

        return run


@pytest.mark.parametrize("before", [None, "0"])
def test_a_kernel_is_compiled_for_the_950_and_any_grid(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launching.EVERY_GRID, raising=False)
    if before is not None:
        monkeypatch.setenv(launching.EVERY_GRID, before)
    kernel = Recorder()
    launching.start(kernel, (70000, 2), 5, BLOCK=16, num_warps=4, num_stages=1, enable_fp_fusion=False)
    assert kernel.seen == ((70000, 2), (5,), {"BLOCK": 16, "compile_on_910_95": True}, "1")
    assert os.environ.get(launching.EVERY_GRID) == before


@pytest.mark.parametrize(
    ("errors", "calls", "raised"),
    [
        ([], 1, None),
        (["Stack dump:"] * 3, 4, None),
        (["Stack dump:"] * 4, 4, "Stack dump"),
        (["ub overflow", "Stack dump:"], 1, "ub overflow"),
    ],
)
def test_a_crash_of_the_compiler_is_tried_again(errors: list[str], calls: int, raised: str | None) -> None:
    seen = []

    def kernel(**_: Any) -> None:
        seen.append(1)
        if len(seen) <= len(errors):
            raise RuntimeError(errors[len(seen) - 1])

    with pytest.raises(RuntimeError, match=raised) if raised else nullcontext():
        launching.start({(1,): kernel}, (1,))
    assert len(seen) == calls


def test_threads_that_launch_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launching.EVERY_GRID, raising=False)
    begun, done = threading.Event(), threading.Event()

    def first(**_: Any) -> None:
        other.start()
        begun.wait(0.2)  # in vain: the other must not begin before this one ends

    def second(**_: Any) -> None:
        begun.set()
        done.wait()

    other = threading.Thread(target=launching.start, args=({(1,): second}, (1,)))
    launching.start({(1,): first}, (1,))
    done.set()
    other.join()
    assert launching.EVERY_GRID not in os.environ


def test_npu_tensors_are_launched_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *error: object) -> None:
            entered.append(None)

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(device=Guard))
    tensor = torch.empty(2, device="meta")
    npu = SimpleNamespace(device=SimpleNamespace(type="npu", index=3))
    monkeypatch.setattr(launchers, "Tensor", SimpleNamespace)
    kernel = Recorder()
    launchers.launch(kernel, (0, 4), npu, tensor)
    assert not hasattr(kernel, "seen")  # an empty grid
    launchers.launch(kernel, (4,), npu, tensor, BLOCK=8)
    assert kernel.seen[2] == {"BLOCK": 8, "compile_on_910_95": True}
    assert entered == [npu.device, None]
