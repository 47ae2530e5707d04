"""Values of the Triton kernels without a GPU: every contract sample, interpreted, against the reference in float64."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbackend import backends
from kvbackend.ops import registry
from tests import edges

from .interpreted import OTHERS, complaints

ROOT = Path(__file__).parents[2]
WITH_LAUNCHER = [name for name in registry if backends.registered()["cuda_triton"].adapter(name)]
PROCESSES = 8  # that share the work: few, since each begins by importing torch and triton

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),
]


def interpreted(*arguments: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda_triton.interpreted", *arguments],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("names", [[*WITH_LAUNCHER, *OTHERS][first::PROCESSES] for first in range(PROCESSES)], ids=str)
def test_every_sample_equals_the_reference(names: list[str]) -> None:
    """Also: blocks whose offsets pass 2^31, and rows that must not depend on their batch mates."""
    verdicts = interpreted(*names)
    assert not [complaint for name in names for complaint in complaints(name, verdicts[name])]


@pytest.mark.parametrize("name", edges.OPS)
def test_sizes_where_engines_broke_equal_the_reference(name: str) -> None:
    assert not complaints(name, interpreted("--edges", name)[name])
