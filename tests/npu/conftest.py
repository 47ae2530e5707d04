"""What the tests of the Ascend backend share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from kvbackend.backends.npu import cann_ops, target
from kvbackend.backends.npu.target import Found, Target
from tests.doubles import cann_ops_transformer
from tests.doubles.torch_npu import TorchNpu

CANN = {"2026-01": "8.5.0", "2026-04": "9.0.0", "2026-06": "9.0.0", "2026-07": "9.1.0", "2026-08": "9.1.0"}


@pytest.fixture(scope="session")
def cann_state() -> Iterator[Callable[[int], None]]:
    """Bring the double of CANN's package into one of its states."""
    libraries: dict[int, torch.library.Library] = {}

    def bring(state: int) -> None:
        if state not in libraries:
            leave()
            libraries[state] = cann_ops_transformer.define(state)

    def leave() -> None:
        while libraries:
            libraries.popitem()[1]._destroy()

    yield bring
    leave()


@pytest.fixture
def become(cann_state, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchNpu]:
    """Make this process a machine of a product and a build train, with the double in torch_npu's place."""

    def become(
        family: str, train: str = "2026-10", cann: str | None = None, state: int = cann_ops_transformer.NEWEST
    ) -> TorchNpu:
        here = Target(family, train, cann or CANN.get(train, "9.2.0"))
        monkeypatch.setattr(target, "current", lambda: here)
        monkeypatch.setattr(target, "found", lambda: Found(reasons=("a double is no machine",)))
        double = TorchNpu(train)
        monkeypatch.setitem(sys.modules, "torch_npu", double)
        cann_state(state)
        monkeypatch.setitem(sys.modules, cann_ops.PACKAGE, cann_ops_transformer.module())
        monkeypatch.setattr(cann_ops, "op", double.of_cann)
        return double

    return become
