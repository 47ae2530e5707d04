"""What all tests share."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="the device that the contract tests must find and use")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device under test. Naming one that is not there fails the run: a test that was asked for never skips."""
    name: str = request.config.getoption("--device")
    torch.empty(1, device=name)
    return name
