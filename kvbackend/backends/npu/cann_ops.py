"""CANN's own torch ops, `torch.ops.cann_ops_transformer`: whether they are here, in a state that we know.

CANN's ops-transformer package brings them and compiles the wrapper of an op when it is first called. A name is no
promise: an op's arguments and defaults change from state to state of the package, and the wrapper finds its operator in
whichever library exports the name first. So the installed schema must be one of schemas.json, and the operator must be
CANN's own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ...arrays import one_of
from . import target

PACKAGE = "cann_ops_transformer"
CUSTOM = "libcust_opapi.so"  # of operators that somebody added to CANN; asked before CANN's own
OWN = ("libopapi_transformer.so", "libopapi.so")  # in the order in which the package asks them


def op(name: str) -> Any:
    """The op, which the dispatcher calls by its schema."""
    import_module(PACKAGE)  # registers the ops
    return getattr(torch.ops.cann_ops_transformer, name)


def missing(name: str, aclnn: tuple[str, ...]) -> Iterator[str]:
    """Why an op and the call that prepares it cannot be called here. Where there is no NPU, the backend says that."""
    if target.found().target is None:
        return
    if reason := _not_importable():
        yield reason
        return
    for each in (name, f"{name}_metadata"):
        yield from _unknown_schema(each)
    for operator in aclnn:
        library = exporting(operator)
        if library is None:
            yield (
                f"{operator} is in none of {CUSTOM}, {', '.join(OWN)}; {PACKAGE}.{name} calls it: install the operator "
                f"package of this chip, of the CANN that {PACKAGE} came with"
            )
        elif library not in OWN:
            yield (
                f"{operator} is exported by {library}, which is asked before CANN's own libraries; one name stands for "
                f"operators with other arguments there (docs/ascend.md): leave it out of ASCEND_CUSTOM_OPP_PATH and "
                f"LD_LIBRARY_PATH"
            )


@cache
def _not_importable() -> str:
    try:
        import_module(PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        return (
            f"{PACKAGE} cannot be imported ({error}); DeepSeek-V4's operators are called through it: install CANN's "
            f"ops-transformer package, 9.1.0 or newer, and put its python/site-packages on PYTHONPATH"
        )
    return ""


def _unknown_schema(name: str) -> Iterator[str]:
    known = target.snapshots()[PACKAGE][name]
    try:
        installed = str(op(name).default._schema).removeprefix(f"{PACKAGE}::")
    except AttributeError:
        yield f"{PACKAGE} has no op {name}; it is called as of {known[0]['states'][0]}: upgrade CANN"
        return
    texts = [str(torch._C.parse_schema(entry["schema"])) for entry in known]
    if installed not in texts:
        states = [state for entry in known for state in entry["states"]]
        yield (
            f"{PACKAGE}.{name} is {installed} here; known are its states of ops-transformer {one_of(states)}, in "
            f"kvbackend/backends/npu/schemas.json: install CANN of one of these, or a newer kvbackend"
        )


def exporting(operator: str) -> str | None:
    """The library whose `operator` the package would call, custom ones by their paths; None: no library has it."""
    paths = os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":")
    custom = [str(Path(path, "op_api", "lib", CUSTOM)) for path in paths if path]
    return next((name for name in (*custom, CUSTOM, *OWN) if _exports(name, f"{operator}GetWorkspaceSize")), None)


@cache
def _exports(library: str, symbol: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(library, mode=os.RTLD_LAZY), symbol)
    except OSError:  # there is no such library
        return False
