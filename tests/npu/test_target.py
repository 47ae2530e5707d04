"""Why a machine cannot be used is said by name, and torch_npu is not imported where that would end the process."""

from __future__ import annotations

import sys
import types
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from kvbackend.backends.npu import target
from kvbackend.backends.npu.target import Found, Target


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Look at a machine with this torch_npu, device and CANN; anything else that it would import fails the test."""

    def look(torch_npu="2.13.0", torch_version="2.13.0+cpu", cuda=None, soc=None, error=None) -> Found:
        def version(name: str) -> str:
            if torch_npu is None:
                raise PackageNotFoundError(name)
            return torch_npu

        class Importer:
            def find_spec(self, name, path=None, target=None):
                if name == "torch_npu":
                    raise error or AssertionError("torch_npu was imported")

        monkeypatch.setattr(target, "version", version)
        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Importer(), *sys.meta_path])
        if soc is not None:
            npu = types.SimpleNamespace(is_available=lambda: bool(soc), get_device_name=lambda: soc)
            utils = types.SimpleNamespace(get_cann_version=lambda: "9.1.0")
            monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(npu=npu))
            monkeypatch.setitem(sys.modules, "torch_npu.npu", npu)
            monkeypatch.setitem(sys.modules, "torch_npu.npu.utils", utils)
        return target.found.__wrapped__()

    return look


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (dict(torch_npu=None), "torch_npu is not installed"),
        (dict(cuda="13.0"), "importing both ends the process"),
        (dict(torch_npu="2.12.0"), "torch_npu 2.12.0 is built for torch 2.12.0 alone: install torch==2.12.0"),
        (
            dict(torch_npu="2.9.0.post3", torch_version="2.9.0"),
            "torch_npu is 2.9.0.post3, whose signatures are not known",
        ),
        (dict(error=ImportError("libhccl.so: cannot open shared object file")), "torch_npu cannot be imported"),
        (dict(soc=""), "torch_npu finds no NPU"),
        (dict(soc="Ascend310P3"), "the NPU is Ascend310P3; limits are known for"),
    ],
    ids=str,
)
def test_what_a_machine_lacks_is_said(machine, facts, words) -> None:
    found = machine(**facts)
    assert found.target is None
    assert len(found.reasons) == 1
    assert words in found.reasons[0]
    assert ";" in found.reasons[0]
    assert ": " in found.reasons[0]


@pytest.mark.parametrize(
    ("soc", "family"), [("Ascend950PR_9599", "950PR"), ("Ascend910B2", "910B"), ("Ascend910_9372", "910_93")]
)
def test_a_whole_machine_is_a_target(machine, soc, family) -> None:
    assert machine(soc=soc) == Found(Target(family, "2026-10", "9.1.0"))
