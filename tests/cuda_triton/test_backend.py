"""What the backend says about machines, and that nothing imports triton unasked."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from kvbackend import backends
from kvbackend.backends import cuda_triton
from kvbackend.backends.cuda_triton.resources import MOST
from kvbackend.ops import registry


def test_importing_and_asking_does_not_import_triton() -> None:
    code = (
        "import sys, torch; before = 'triton' in sys.modules\n"
        "from kvbackend import backends\nfrom kvbackend.ops import registry\n"
        "for name in registry:\n    found = backends.registered()['cuda_triton'].adapter(name)\n"
        "assert before or 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("found", "refused"), [("3.1.0", True), ("3.2.0", False), ("3.7.1", False), ("2.3", True)])
def test_refuses_old_triton(found: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_triton, "version", lambda name: found)
    assert any("triton is" in reason for reason in cuda_triton.missing()) == refused


def test_says_that_triton_and_the_gpu_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cuda_triton, "version", nothing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    first, second = cuda_triton.missing()
    assert "pip install triton" in first
    assert "no CUDA device" in second


@pytest.mark.parametrize(
    ("capability", "refused"), [((7, 5), True), ((8, 0), False), ((9, 0), False), ((12, 0), False)]
)
def test_refuses_gpus_before_ampere(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_triton, "version", lambda name: "3.7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert any("compute capability" in reason for reason in cuda_triton.missing()) == refused


def test_every_op_has_a_launcher_and_evidence_of_its_own() -> None:
    """What is not torch's matmul says its registers and shared memory, which ci/cuda_compile.sh compares."""
    backend = backends.registered()["cuda_triton"]
    assert [name for name in registry if backend.adapter(name) is None] == []
    assert {name for name in registry if "matmul" not in backend.evidence_of(name)} == set(MOST)


def test_the_page_says_how_each_op_is_done() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text("utf-8")
    ops = page.partition("\n## Ops\n")[2].partition("\n## ")[0]
    assert [name for name in registry if f"`{name}`" not in ops] == []


def test_float64_is_refused_with_a_reason() -> None:
    adapter = cuda_triton.__name__
    from importlib import import_module

    op = registry["apply_rope"]
    args = dict(op.make_samples("meta", torch.float64))["decode"]
    reasons = list(import_module(f"{adapter}.apply_rope").unsupported(**op.dispatcher.views(op.bind((), args))))
    assert reasons == ["x is torch.float64; the Triton kernels take float32, bfloat16 and float16: convert it"]
