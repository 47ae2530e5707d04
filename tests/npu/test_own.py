"""csrc/npu where it cannot be built or loaded: reasons, and an end that says what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvbackend import native
from kvbackend.backends.npu import own, target
from kvbackend.ops import registry
from tests.npu import judge

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_the_build_ends_with_a_reason_without_torch_npu() -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_npu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 1
    assert re.fullmatch(r"torch_npu is not installed; .*: install the torch-npu of your torch .*\n", done.stderr)


def test_a_library_that_is_not_built_is_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(target, "found", lambda: target.Found(target.ASSUMED))
    monkeypatch.setattr(native.metadata, "version", lambda name: "0.0")
    native.library.cache_clear()
    try:
        (reason,) = own.missing(registry["swap_blocks"])
    finally:
        native.library.cache_clear()
    assert re.match(r"the npu kernels are not built, .*: run `python setup.py build_npu` in the source tree", reason)


def test_nothing_is_loaded_where_there_is_no_npu(monkeypatch) -> None:
    """torch_npu must not come into a process by way of our library."""
    monkeypatch.setattr(target, "found", lambda: target.Found(reasons=("none",)))
    monkeypatch.setattr(native, "library", None)
    assert not list(own.missing(registry["swap_blocks"]))


@pytest.mark.parametrize("op", judge.OWN)
def test_predicates_take_dense_blocks_and_refuse_strided_ones(op, monkeypatch) -> None:
    monkeypatch.setattr(target, "found", lambda: target.Found(reasons=("none",)))
    pool, pairs = torch.zeros(4, 3, 2, 8), torch.tensor([[0, 1]])
    names = ("source", "target") if op == "swap_blocks" else ("cache",)

    def call(**pools: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**{name: pool.clone() for name in names}, **pools, "block_mapping": pairs}

    assert not judge.reasons(op, call())
    every_second = torch.zeros(4, 2, 3, 2, 8)[:, 0]  # blocks are dense, and apart
    empty = torch.zeros(0, 3, 2, 8)
    for name in names:
        assert not judge.reasons(op, call(**{name: every_second}))
        assert not judge.reasons(op, call(**{name: empty}))
        (reason,) = judge.reasons(op, call(**{name: torch.zeros(4, 2, 3, 8).transpose(1, 2)}))
        assert re.match(rf"{name} has strided blocks; .*: .*", reason)
