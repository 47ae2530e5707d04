"""Facts from importing torch and torch_npu in children: once clean of paths, once as the user would."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from kvbackend.doctor import facts
from kvbackend.doctor.collect import python
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host
from kvbackend.doctor.process import Output

PRELUDE = """
import json, os, sys
def answer(**what):
    left = json.dumps(what).encode() + b"\\n"
    while left:
        left = left[os.write(int(sys.argv[1]), left):]
def loaded(*stems):
    lines = open("/proc/self/maps").read().splitlines()
    paths = {line.split()[-1] for line in lines if "/" in line}
    return sorted(p for p in paths if p.rpartition("/")[2].startswith(stems))
STEMS = ("libascendcl.", "libascend_hal.", "libhccl.", "libatb.", "libstdc++.", "libcudart.", "libnccl.", "libcuda.")
"""
TORCH = """
try:
    import torch
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() or ""
    answer(ok=True, version=torch.__version__, file=torch.__file__, abi=int(torch.compiled_with_cxx11_abi()),
           cuda=torch.version.cuda, archs=flags.split(), loaded=loaded(*STEMS),
           capability=torch.backends.cpu.get_cpu_capability())
except BaseException as error:
    answer(ok=False, error="%s: %s" % (type(error).__name__, error))
    raise SystemExit
"""
# importing again what the clean child has imported would tell nothing, unless something loads itself into torch
_REAL = """
from importlib.metadata import entry_points
from importlib.util import find_spec
points = entry_points()
points = points.select(group="torch.backends") if hasattr(points, "select") else points.get("torch.backends", [])
spec = find_spec("torch")
if spec and spec.origin == CLEAN + "/__init__.py" and not list(points):
    answer(ok=True, file=spec.origin, same=True)
    raise SystemExit
"""
_TORCH_NPU = """
try:
    import torch, torch_npu
    answer(ok=True, version=torch_npu.__version__, file=torch_npu.__file__, cann=getattr(torch.version, "cann", None),
           loaded=loaded(*STEMS))
except BaseException as error:
    answer(ok=False, error="%s: %s" % (type(error).__name__, error))
"""
PATIENCE = 3  # a cold import of torch reads a gigabyte: it gets this many time limits


def child(host: Host, code: str, timeout: float, clean: bool = True, **env: str) -> Output:
    """Run Python code that calls `answer(...)`; `clean` keeps PYTHONPATH, the user's site and the folder out."""
    argv = [sys.executable] + (["-I"] if clean else []) + ["-c", PRELUDE + code, "{answer}"]
    return host.run(argv, timeout=PATIENCE * timeout, env={**host.environ, **env})


def outcome(output: Output, source: str, number: int = 0) -> facts.Fact:
    """What a child answered at its `number`th time: a value with `ok`, or timeout."""
    answer = parse_answer(output.answer, number)
    if answer is None and output.ended == "timeout":
        return facts.failed("timeout", source, f"no end after {output.seconds:.0f} s", output.text[-facts.RAW_LIMIT :])
    if answer is None:
        how = signal_name(-output.code) if output.ended == "signal" else f"{output.ended} {output.code}"
        answer = {"ok": False, "error": f"the import ended with {how}"}
    return facts.value(answer, source, raw=output.text[-facts.RAW_LIMIT :])


def parse_answer(text: str, number: int) -> dict[str, Any] | None:
    """The `number`th line of a child's answers; None when it is not there or not whole."""
    lines = text.split("\n")[:-1]
    try:
        answer = json.loads(lines[number])
    except (ValueError, IndexError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("ok"), bool) else None


def signal_name(number: int) -> str:
    """SIGABRT for 6."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def torch_facts(output: Output) -> Facts:
    """The facts of a clean child whose first answer is that of `TORCH`."""
    fact = outcome(output, "python -I -c 'import torch'")
    answer = fact.get("value", {})
    found = {"torch.import": fact}
    for key in ("version", "abi", "archs", "loaded", "capability"):
        found["torch.import." + key] = facts.maybe(answer.get(key), "import torch")
    return found


def torch_real(host: Host, timeout: float) -> Facts:
    """Import torch as the user's shell would, from this folder and with this PYTHONPATH."""
    folder = python.package_folder(host, "torch")
    if not folder:
        return {"torch.import.real": facts.absent("site-packages")}
    output = child(host, _REAL.replace("CLEAN", repr(folder)) + TORCH, timeout, clean=False)
    fact = outcome(output, "python -c 'import torch'")
    path = fact.get("value", {}).get("file")
    return {
        "torch.import.real": fact,
        "torch.import.file": facts.maybe(path and os.path.dirname(path), "import torch"),
    }


def torch_npu(host: Host, timeout: float) -> Facts:
    """Import torch_npu, and see which CANN libraries that loads."""
    if not python.package_folder(host, "torch_npu"):
        return {"torch_npu.import": facts.absent("site-packages")}
    output = child(host, _TORCH_NPU, timeout, clean=False, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    fact = outcome(output, "python -c 'import torch_npu'")
    answer = fact.get("value", {})
    places: list[str] = [p for p in answer.get("loaded") or [] if "/libascendcl." in p]
    return {
        "torch_npu.import": fact,
        "torch_npu.import.cann": facts.maybe(answer.get("cann"), "torch.version.cann"),
        "torch_npu.import.ascendcl": facts.maybe(places[0] if places else "", "/proc/self/maps"),
    }
