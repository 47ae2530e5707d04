"""Facts from vendor tools, each run as a child with a time limit; exit codes are not trusted, texts are read."""

from __future__ import annotations

import sys
from typing import Any

from kvbackend.doctor import facts
from kvbackend.doctor.collect import ascend, cuda
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host
from kvbackend.doctor.parsers import npu_smi, tools
from kvbackend.doctor.process import Output

_QUERY = "--query-gpu=index,name,uuid,compute_cap,memory.total,driver_version,mig.mode.current"
_CUDA_API = (
    "import ctypes, os, sys\nn = ctypes.c_int()\n"
    "ctypes.CDLL('libcuda.so.1').cuDriverGetVersion(ctypes.byref(n))\nos.write(int(sys.argv[1]), b'%d' % n.value)"
)


def failure(output: Output, source: str) -> facts.Fact:
    """The fact for a tool that gave nothing usable."""
    if output.ended == "missing":
        return facts.failed("absent", source, output.stderr)
    if output.ended in ("timeout", "flood"):
        return facts.failed(
            "timeout" if output.ended == "timeout" else "unparsed",
            source,
            f"{output.ended} after {output.seconds:.0f} s",
            output.text,
        )
    error = tools.last_line(output.text) or f"ended with {output.ended} {output.code}"
    return facts.failed("unparsed", source, error, output.text)


def npu(host: Host, timeout: float) -> Facts:
    """`npu-smi`: the driver's own view of cards, health and SoC name."""
    path = ascend.driver(host)["ascend.smi.path"].get("value")
    if not path:
        return {"ascend.smi.chips": facts.absent("PATH")}
    output = host.run([path, "info"], timeout=timeout)
    info = npu_smi.info(output.stdout)
    if info is None or not info["chips"]:
        found = {"ascend.smi.chips": failure(output, "npu-smi info")}
        problem = npu_smi.error(output.text)
        found["ascend.smi.error"] = facts.maybe(problem, "npu-smi info", raw=output.text[: facts.RAW_LIMIT])
        return found
    found = {
        "ascend.smi.chips": facts.value(info["chips"], "npu-smi info", raw=output.stdout[: facts.RAW_LIMIT]),
        "ascend.smi.driver": facts.value(info["driver"], "npu-smi info"),
        "ascend.smi.processes": facts.maybe(info["processes"], "npu-smi info"),
    }
    card = str(info["chips"][0]["npu"])
    board = host.run([path, "info", "-t", "board", "-i", card], timeout=timeout)
    plain = npu_smi.board(board.stdout) or {}
    soc = plain.get("soc")
    if not soc and "950" not in info["chips"][0]["name"]:
        soc = (
            npu_smi.board(host.run([path, "info", "-t", "board", "-i", card, "-c", "0"], timeout=timeout).stdout) or {}
        ).get("soc")
    found["ascend.soc"] = facts.maybe(soc, f"npu-smi info -t board -i {card}")
    found["ascend.smi.firmware"] = facts.maybe(plain.get("firmware"), "npu-smi info -t board", raw=board.stdout[:2048])
    found["ascend.smi.compatibility"] = facts.maybe(plain.get("compatibility"), "npu-smi info -t board")
    sick: dict[str, dict[str, Any]] = {}
    for chip in info["chips"]:
        if chip["health"] not in ("OK", "UNKNOWN") and str(chip["npu"]) not in sick and len(sick) < 4:
            text = host.run([path, "info", "-t", "health", "-i", str(chip["npu"])], timeout=timeout).stdout
            codes = (npu_smi.health(text) or {}).get("codes", [])
            sick[str(chip["npu"])] = {"health": chip["health"], "codes": codes}
    found["ascend.health"] = facts.maybe(sick, "npu-smi info")
    return found


def nvidia(host: Host, timeout: float) -> Facts:
    """`nvidia-smi` and the CUDA version of the user driver."""
    path = host.which("nvidia-smi")
    if not path:
        return {"cuda.smi.gpus": facts.absent("PATH")}
    output = host.run([path, _QUERY, "--format=csv,noheader,nounits"], timeout=timeout)
    gpus = tools.nvidia_smi_query(output.stdout)
    if not gpus:
        return {
            "cuda.smi.gpus": failure(output, "nvidia-smi"),
            "cuda.smi.error": facts.maybe(tools.nvidia_smi_error(output.text), "nvidia-smi", raw=output.text[:2048]),
        }
    archs = sorted({"sm_" + g["compute_cap"].replace(".", "") for g in gpus if g["compute_cap"]})
    answer = host.run([sys.executable, "-I", "-c", _CUDA_API, "{answer}"], timeout=timeout).answer
    number = int(answer) if answer.isdigit() else 0
    api = f"{number // 1000}.{number % 1000 // 10}" if number else ""
    return {
        "cuda.smi.gpus": facts.value(gpus, "nvidia-smi", raw=output.stdout[: facts.RAW_LIMIT]),
        "cuda.gpu.archs": facts.maybe(archs, "nvidia-smi"),
        "cuda.driver.api": facts.maybe(api, "cuDriverGetVersion"),
    }


def versions(host: Host, timeout: float) -> Facts:
    """Version lines of the compilers that the static probes found."""
    toolkit, vendor = cuda.toolkit(host), ascend.compilers(host)
    found: Facts = {}
    for key, path, option, parse in (
        ("cuda.nvcc.version", toolkit["cuda.nvcc"].get("value"), "-V", tools.cuda_release),
        ("cuda.ptxas.version", toolkit["cuda.ptxas.path"].get("value"), "-V", tools.cuda_release),
        (
            "ascend.bisheng.version",
            vendor["ascend.bisheng"].get("value"),
            "--version",
            lambda text: (tools.clang(text) or {}).get("version"),
        ),
        ("host.cxx.version", host.which("c++"), "-dumpfullversion", tools.first_version),
    ):
        if path:
            output = host.run([path, option], timeout=timeout)
            version = parse(output.text)
            found[key] = facts.value(version, path, raw=output.text[:512]) if version else failure(output, path)
    return found
