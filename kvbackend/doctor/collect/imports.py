"""Facts from importing torch and torch_npu in children: once clean of paths, once as the user would."""

import json
import os
import signal
import sys
from typing import Any, Dict, List, Optional

from kvbackend.doctor import facts
from kvbackend.doctor.collect import python
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host
from kvbackend.doctor.process import Output

_PRELUDE = """
import json, os, sys
def answer(**what):
    os.write(int(sys.argv[1]), json.dumps(what).encode())
def loaded(*stems):
    lines = open("/proc/self/maps").read().splitlines()
    paths = {line.split()[-1] for line in lines if "/" in line}
    return sorted(p for p in paths if p.rpartition("/")[2].startswith(stems))
STEMS = ("libascendcl.", "libascend_hal.", "libhccl.", "libatb.", "libstdc++.", "libcudart.", "libnccl.", "libcuda.")
try:
"""
_TORCH = _PRELUDE + """
    import torch
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() or ""
    answer(ok=True, version=torch.__version__, file=torch.__file__, abi=int(torch.compiled_with_cxx11_abi()),
           cuda=torch.version.cuda, archs=flags.split(), loaded=loaded(*STEMS), capability=torch.backends.cpu.get_cpu_capability())
except BaseException as error:
    answer(ok=False, error="%s: %s" % (type(error).__name__, error))
"""
_TORCH_NPU = _PRELUDE + """
    import torch, torch_npu
    answer(ok=True, version=torch_npu.__version__, file=torch_npu.__file__, cann=getattr(torch.version, "cann", None),
           loaded=loaded(*STEMS))
except BaseException as error:
    answer(ok=False, error="%s: %s" % (type(error).__name__, error))
"""


def child(host: Host, code: str, timeout: float, clean: bool = True, **env: str) -> Output:
    """Run Python code that calls `answer(...)`; `clean` keeps PYTHONPATH, the user's site and the folder out."""
    argv = [sys.executable] + (["-I"] if clean else []) + ["-c", code, "{answer}"]
    return host.run(argv, timeout=timeout, env={**host.environ, **env})


def outcome(output: Output, source: str) -> facts.Fact:
    """What the import gave: a value with `ok`, or timeout."""
    if output.ended == "timeout":
        return facts.failed("timeout", source, "no end after %.0f s" % output.seconds, output.text[-facts.RAW_LIMIT:])
    answer = parse_answer(output)
    if answer is None:
        how = signal_name(-output.code) if output.ended == "signal" else "%s %d" % (output.ended, output.code)
        answer = {"ok": False, "error": "the import ended with %s" % how}
    return facts.value(answer, source, raw=output.text[-facts.RAW_LIMIT:])


def parse_answer(output: Output) -> Optional[Dict[str, Any]]:
    try:
        answer = json.loads(output.answer)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("ok"), bool) else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def torch(host: Host, timeout: float) -> Facts:
    """Import torch cleanly, without the backends it would load by itself."""
    if not python.package_folder(host, "torch"):
        return {"torch.import": facts.absent("site-packages")}
    fact = outcome(child(host, _TORCH, timeout, TORCH_DEVICE_BACKEND_AUTOLOAD="0"), "python -I -c 'import torch'")
    answer = fact.get("value", {})
    found = {"torch.import": fact}
    for key in ("version", "abi", "archs", "loaded", "capability"):
        found["torch.import." + key] = facts.maybe(answer.get(key), "import torch")
    return found


def torch_real(host: Host, timeout: float) -> Facts:
    """Import torch as the user's shell would, from this folder and with this PYTHONPATH."""
    if not python.package_folder(host, "torch"):
        return {"torch.import.real": facts.absent("site-packages")}
    fact = outcome(child(host, _TORCH, timeout, clean=False), "python -c 'import torch'")
    path = fact.get("value", {}).get("file")
    return {"torch.import.real": fact, "torch.import.file": facts.maybe(path and os.path.dirname(path), "import torch")}


def torch_npu(host: Host, timeout: float) -> Facts:
    """Import torch_npu, and see which CANN libraries that loads."""
    if not python.package_folder(host, "torch_npu"):
        return {"torch_npu.import": facts.absent("site-packages")}
    output = child(host, _TORCH_NPU, timeout, clean=False, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    fact = outcome(output, "python -c 'import torch_npu'")
    answer = fact.get("value", {})
    places: List[str] = [p for p in answer.get("loaded") or [] if "/libascendcl." in p]
    return {"torch_npu.import": fact, "torch_npu.import.cann": facts.maybe(answer.get("cann"), "torch.version.cann"),
            "torch_npu.import.ascendcl": facts.maybe(places[0] if places else "", "/proc/self/maps")}
