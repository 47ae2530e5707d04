"""The compiled libraries: what is built here, and how every failure becomes a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbackend import codegen, native
from kvbackend.ops import registry, reshape_and_cache

SOURCES = Path(__file__).parents[1] / "csrc" / "cpu"


def test_the_library_implements_every_source_file_with_todays_schema() -> None:
    loaded = native.library("cpu")
    assert loaded.reason is None
    assert loaded.schemas.keys() == {path.stem for path in SOURCES.glob("*.cpp")} & registry.keys()
    for name in loaded.schemas:
        assert not list(native.missing(registry[name], "cpu"))


def test_a_library_built_for_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native, "library", lambda device: native.DeviceLibrary({"reshape_and_cache": "reshape_and_cache() -> ()"})
    )
    assert "another version" in next(native.missing(reshape_and_cache, "cpu"))
    monkeypatch.setattr(native, "library", lambda device: native.DeviceLibrary({}))
    assert "built without reshape_and_cache" in next(native.missing(reshape_and_cache, "cpu"))


def test_a_library_built_for_other_formats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have a copy of the table of formats; ops that take no kv_format do not ask."""
    codegen._digest.cache_clear()
    monkeypatch.setattr(codegen, "formats_table", lambda: "another")
    assert "another version" in next(native.missing(reshape_and_cache, "cpu"))
    assert not list(native.missing(registry["copy_blocks"], "cpu"))
    codegen._digest.cache_clear()


@pytest.fixture
def fresh():
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert "not built" in (native.library("cpu").reason or "")


@pytest.mark.usefixtures("fresh")
def test_a_broken_library_is_a_reason_that_sends_to_the_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    (tmp_path / "libkvbackend_cpu.so").write_bytes(b"not a library")
    reason = native.library("cpu").reason or ""
    assert "cannot be loaded" in reason
    assert reason.endswith("run `kvbackend doctor`")


@pytest.mark.usefixtures("fresh")
def test_an_old_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert "2.10 or newer" in (native.library("cpu").reason or "")


@pytest.mark.usefixtures("fresh")
def test_a_misspelled_instruction_set_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBACKEND_CPU_ISA", "AVX2")
    assert "it must be plain, avx2, avx512, avx512_bf16, amx or unset" in (native.library("cpu").reason or "")


def test_without_the_library_everything_works_on_the_reference(tmp_path: Path) -> None:
    """In a process of its own: the reason is told once, the result is right."""
    code = (
        "import pathlib, sys, torch, kvbackend.native as native\n"
        "native.FOLDER = pathlib.Path(sys.argv[1])\n"
        "from kvbackend.ops import paged_attention\n"
        "out, lse = paged_attention(**dict(paged_attention.make_samples('cpu', torch.float32))['mixed'])\n"
        "print(out.isfinite().all().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert done.stderr.count("kernels are not built") == 1


@pytest.mark.parametrize("isa", native.CPU_ISAS)
def test_instruction_sets_can_be_forced_down(isa: str) -> None:
    pytest.importorskip("kvbackend._build", reason="the pybind11 module is not built")
    features = native.build_facts()["cpu_features"]
    order = native.CPU_ISAS
    features |= {"plain": True, "amx": features["amx_bf16"]}
    best = next(name for name in reversed(order) if features[name])
    code = "import ctypes, sys, torch; f = ctypes.CDLL(sys.argv[1]).kvbackend_isa; f.restype = ctypes.c_char_p; "
    command = [sys.executable, "-c", code + "print(f().decode())", str(native.FOLDER / "libkvbackend_cpu.so")]
    environment = os.environ | {"KVBACKEND_CPU_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == min(isa, best, key=order.index)


def test_build_facts() -> None:
    pytest.importorskip("kvbackend._build", reason="the pybind11 module is not built")
    facts = native.build_facts()
    assert "cpu" in facts["build"]["libraries"].split()
    assert facts["build"]["torch"].startswith("2.")
    assert facts["build"]["torch_target"] == ".".join(map(str, native.MIN_TORCH))
    listed = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    for feature in ("avx2", "avx512_bf16", "avx512_vbmi", "avx512_fp16", "gfni", "amx_bf16", "amx_int8"):
        flag = feature.replace("_vbmi", "vbmi")  # as Linux spells it
        assert facts["cpu_features"][feature] == (flag in listed), feature


def test_a_missing_module_sends_to_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvbackend._build", None)
    monkeypatch.delattr("kvbackend._build", raising=False)
    with pytest.raises(ImportError, match=r"run: kvbackend doctor$"):
        native.build_facts()
