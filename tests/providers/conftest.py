"""What the tests of the providers share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import pytest

from kvbackend.backends import nvidia
from tests.doubles.library import Library


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Library]:
    """Make this process a machine with a GPU of some compute capability and a double in a library's place."""

    def become(name: str, capability: tuple[int, int] = (9, 0)) -> Library:
        monkeypatch.setattr(nvidia, "capability", lambda: capability)
        double: Library = import_module(f"tests.doubles.{name}").library()
        monkeypatch.setitem(sys.modules, name, double)
        return double

    return become
