"""What must not be started on an Ascend 950 is refused, and every guard that is broken on purpose fails a test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbackend.backends import npu_triton
from kvbackend.backends.cuda_triton import launching as launchers
from kvbackend.backends.npu import target
from kvbackend.backends.npu_triton import launching, limits
from tests.npu_triton import guards, test_backend

EVERY_OP = pytest.mark.parametrize("op", guards.GUARDED)
Check = Callable[[pytest.MonkeyPatch], None]


@EVERY_OP
def test_the_widest_call_is_taken_and_a_wider_one_is_not(op: str) -> None:
    guards.hold(op)


def all_hold(_: pytest.MonkeyPatch) -> None:
    for op in guards.GUARDED:
        guards.hold(op)


def launched(patch: pytest.MonkeyPatch) -> None:
    test_backend.test_a_kernel_is_compiled_for_the_950_and_any_grid(None, patch)


# the mistake, where it is made, what stands there then, and who must notice it
MISTAKES: list[tuple[str, Any, str, Any, Check]] = [
    ("rows of any width", limits, "WIDEST", 1 << 20, all_hold),
    ("heads of 4 bits of any width", limits, "WIDEST_PACKED", 1 << 20, all_hold),
    ("rows of half the width", limits, "WIDEST", 1024, all_hold),
    ("formats of 4 bits not told from others", limits.split, "per_byte", lambda _: 1, all_hold),
    *(
        (
            f"{op}: the guard of CUDA alone",
            import_module(f"{npu_triton.__name__}.{op}"),
            "unsupported",
            import_module(f"kvbackend.backends.cuda_triton.{op}").unsupported,
            lambda _, op=op: guards.hold(op),
        )
        for op in guards.GUARDED
    ),
    (
        "any triton-ascend",
        npu_triton,
        "TRITON_ASCEND",
        "3.1.0",
        lambda patch: test_backend.test_refuses_another_triton_ascend("3.1.0", "is 3.1.0", patch),
    ),
    (
        "any Ascend",
        target,
        "A5",
        target.FAMILIES,
        lambda patch: test_backend.test_refuses_what_the_kernels_were_not_compiled_for("910B", patch),
    ),
    ("compiled for what Triton takes the chip for", launching, "OPTIONS", {}, launched),
    ("options of CUDA passed on", launching, "CUDA_OPTIONS", (), launched),
    ("65535 programs at most", launching, "every_grid", nullcontext, launched),
    (
        "a crash of the compiler ends the call",
        launching,
        "TRIES",
        1,
        lambda _: test_backend.test_a_crash_of_the_compiler_is_tried_again(["Stack dump:"] * 3, 4, None),
    ),
    (
        "every error is tried again",
        launching,
        "CRASH",
        "",
        lambda _: test_backend.test_a_crash_of_the_compiler_is_tried_again(["ub overflow", ""], 1, "ub overflow"),
    ),
    (
        "threads launch at one time",
        launching,
        "_ONE_AT_A_TIME",
        nullcontext(),
        test_backend.test_threads_that_launch_leave_the_environment_as_it_was,
    ),
    (
        "steps of 16 keys of bfloat16",
        launchers,
        "keys_at_a_time",
        lambda count, dtype: count,
        lambda patch: test_backend.test_steps_of_16_keys_are_of_float32_alone(True, torch.bfloat16, 32, patch),
    ),
]


@pytest.mark.parametrize(
    ("where", "attribute", "value", "check"),
    [pytest.param(*rest, id=name) for name, *rest in MISTAKES],
)
def test_a_broken_guard_is_noticed(where: Any, attribute: str, value: Any, check: Check) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check(patch)  # as it is
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, attribute, value)
        with pytest.raises((AssertionError, RuntimeError, ValueError, pytest.fail.Exception)):
            check(patch)


def test_the_documented_list_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text()
    for name, *_ in MISTAKES:
        assert f"| {name} |" in text
    assert f"{len(MISTAKES)} mistakes" in text
