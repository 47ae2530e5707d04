"""`import kvbackend` is free: no torch, no device library, under 50 ms."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


def imports(statement: str) -> dict[str, int]:
    """Microseconds of each module that a statement imports, its own imports included."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    trace = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    rows = re.findall(r"import time:\s+\d+ \|\s+(\d+) \| +(\S+)", trace)
    return {name: int(time) for time, name in rows}


def test_import_is_light() -> None:
    found = imports("import kvbackend")
    assert not {"torch", "torch_npu", "numpy", "triton"} & found.keys()


def test_import_takes_less_than_50_ms() -> None:
    assert min(imports("import kvbackend")["kvbackend"] for _ in range(5)) < 50_000


@pytest.mark.parametrize(
    "command", ["--help", "run --help", "plan --help", "doctor --help", "ops --help", "matrix --help"]
)
def test_help_needs_no_torch(command: str) -> None:
    found = imports(
        f"import sys; from kvbackend.cli import main\ntry: main({command.split()!r})\nexcept SystemExit: pass"
    )
    assert "kvbackend.cli" in found
    assert "torch" not in found


def test_every_lazy_name_resolves() -> None:
    import kvbackend

    for name in kvbackend.__all__:
        assert getattr(kvbackend, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvbackend.nonsense
