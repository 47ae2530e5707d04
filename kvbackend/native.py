"""The compiled kernels: one library per device, loaded when a backend first asks, every failure a reason.

A library implements ops of the namespace `kvbackend_native`, whose schemas `spec.py` declares. Kernels registered
through libtorch's stable ABI are boxed, and torch compares the number of their arguments only, so each library
carries the schemas and formats that it was built for (`kvbackend_stamp`) and an op whose own have changed since is
refused.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import codegen
from .doctor import explain_import_error, primary_cause
from .spec import NATIVE_NAMESPACE

if TYPE_CHECKING:
    from .spec import Op

FOLDER = Path(__file__).parent / "_lib"
CPU_ISAS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")  # what KVBACKEND_CPU_ISA may force (csrc/cpu/isa.cpp)
MIN_TORCH = (2, 10)  # TORCH_TARGET_VERSION of the libraries (setup.py)
_BUILDING = {"npu": "python setup.py build_npu"}  # in the source tree
_COMPILER = "a C++17 compiler builds them"
_BUILDERS = {"cuda": "nvcc and a CUDA build of torch make them"}


@dataclass(frozen=True)
class DeviceLibrary:
    """One loaded library, or why it is not there."""

    schemas: dict[str, str] = field(default_factory=dict)  # op -> the schema (and formats) its kernel was built for
    isa: str = ""  # the instruction set that its kernels use
    direct_ops: int = 0  # the address of what lists its kernels for calls past torch's dispatcher (csrc/common/call.h)
    reason: str | None = None


@cache
def library(device: str) -> DeviceLibrary:
    """Load `_lib/libkvbackend_<device>.so`, once per process; that of an NPU lies in a folder for its torch_npu."""
    folder = FOLDER / f"torch_npu-{metadata.version('torch-npu')}" if device == "npu" else FOLDER
    path = folder / f"libkvbackend_{device}.so"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    forced = os.environ.get("KVBACKEND_CPU_ISA", "")
    if device == "cpu" and forced not in ("", *CPU_ISAS):
        return DeviceLibrary(
            reason=f"KVBACKEND_CPU_ISA is {forced!r}; it must be {', '.join(CPU_ISAS)} or unset: set one of these"
        )
    if version < MIN_TORCH:
        return DeviceLibrary(reason=f"torch is {torch.__version__}; the kernels need 2.10 or newer: upgrade torch")
    if not path.exists():
        return DeviceLibrary(
            reason=f"the {device} kernels are not built, {path.name} is missing; {_BUILDERS.get(device, _COMPILER)}: "
            f"run `{building(device)}` in the source tree and read its output"
        )
    try:
        loaded = ctypes.CDLL(str(path))
        stamp, isa = loaded.kvbackend_stamp, getattr(loaded, "kvbackend_isa", None)
    except (OSError, AttributeError) as error:
        cause = primary_cause(str(error))
        what = f"{path.name} cannot be loaded ({error})" + (f"; {cause}" if cause else "")
        return DeviceLibrary(reason=f"{what}: run `kvbackend doctor`")
    stamp.restype = ctypes.c_char_p
    schemas = {line.partition("(")[0]: line for line in stamp().decode().splitlines()}
    if isa is None:
        return DeviceLibrary(schemas)
    isa.restype = ctypes.c_char_p
    listed = getattr(loaded, "kvbackend_direct_ops", None)
    return DeviceLibrary(schemas, isa().decode(), (ctypes.cast(listed, ctypes.c_void_p).value or 0) if listed else 0)


def building(device: str) -> str:
    """The command that builds a device's library."""
    return _BUILDING.get(device, "pip install --no-build-isolation -e .")


def build_facts() -> dict[str, Any]:
    """What the pybind11 module knows: `build`, how it was compiled, and `cpu_features`, what this CPU can do.

    Raises ImportError where the module is not there, with the one primary cause and "run: kvbackend doctor".
    """
    try:
        from . import _build
    except ImportError as error:
        raise ImportError(explain_import_error(error)) from error
    return {"build": _build.build_info(), "cpu_features": _build.cpu_features()}


def missing(op: Op, device: str) -> Iterator[str]:
    """Why a loaded library has no usable kernel for the op; why it is not loaded, the backend itself says."""
    loaded = library(device)
    if loaded.reason:
        return
    if op.name not in loaded.schemas:
        yield f"the {device} library was built without {op.name}: run `{building(device)}` again"
    elif loaded.schemas[op.name] != codegen.stamp(op):
        yield f"the {device} library was built for another version of {op.name}: rebuild it with `{building(device)}`"


def kernel(op: Op) -> Callable[..., Any]:
    """The op's native kernel; call it only where `missing` yields nothing."""
    overload = getattr(getattr(torch.ops, NATIVE_NAMESPACE), op.name).default
    call: Callable[..., Any] = getattr(overload, "_op", overload)  # what it calls, without a Python frame of its own
    return call
