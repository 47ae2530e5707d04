"""What the tests of the Ascend backend share."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from kvbackend.backends.npu import target
from kvbackend.backends.npu.target import Target
from tests.doubles.torch_npu import TorchNpu

CANN = {"2026-01": "8.5.0", "2026-04": "9.0.0", "2026-06": "9.0.0", "2026-07": "9.1.0", "2026-08": "9.1.0"}


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchNpu]:
    """Make this process a machine of a product and a build train, with the double in torch_npu's place."""

    def become(family: str, train: str = "2026-10", cann: str | None = None) -> TorchNpu:
        here = Target(family, train, cann or CANN.get(train, "9.1.0"))
        monkeypatch.setattr(target, "current", lambda: here)
        double = TorchNpu(train)
        monkeypatch.setitem(sys.modules, "torch_npu", double)
        return double

    return become
