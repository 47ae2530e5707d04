"""Checks of the CUDA stack: device, driver, toolkit, runtime libraries, compilers."""

from __future__ import annotations

from kvbackend.doctor.facts import View
from kvbackend.doctor.judge.check import Check, Row, blocked, info, listed, ok, plain, unknown


def _pci(view: View) -> Row | None:
    cards = view["cuda.pci"]
    return ok("{count} x PCI 10de:{device}", count=len(cards), device=cards[0]["device"]) if cards else None


def _nodes(view: View) -> Row | None:
    return ok("nodes {nodes}", nodes=listed(view["cuda.nodes"])) if view["cuda.nodes"] else unknown("no device nodes")


def _smi(view: View) -> Row | None:
    gpus = view["cuda.smi.gpus"]
    if gpus:
        names = sorted({g["name"] for g in gpus})
        return ok(
            "{count} x {names}, {archs}",
            count=len(gpus),
            names=listed(names),
            archs=listed(view["cuda.gpu.archs"] or []),
        )
    if view.state("cuda.smi.gpus") == "timeout":
        return blocked("nvidia-smi gave no answer ({error})", error=view.error("cuda.smi.gpus"))
    if view.state("cuda.smi.gpus") == "absent":
        return unknown("nvidia-smi is not here")
    return unknown("nvidia-smi: {error}", error=view.error("cuda.smi.gpus"))


def _user(view: View) -> Row | None:
    if view["cuda.driver.user"]:
        return ok("libcuda {value}", value=view["cuda.driver.user"])
    return ok("libcuda present") if view["cuda.libcuda"] else unknown("libcuda.so.1 is not visible")


def _pair(view: View) -> Row | None:
    kernel, nvml = view["cuda.driver.kernel"], view["cuda.driver.nvml"]
    return ok("kernel and user driver agree") if kernel and kernel == nvml else None


def _fabric(view: View) -> Row | None:
    if not view["cuda.nvswitch"]:
        return None
    if view["cuda.fabricmanager"]:
        return ok("fabric manager runs")
    return info("NVSwitch nodes, but no fabric manager in this view; it may run on the host")


def _toolkit(view: View) -> Row | None:
    version = view["cuda.nvcc.version"] or view["cuda.toolkit.version"]
    return ok("CUDA toolkit {version} at {path}", version=version, path=view["cuda.toolkit.home"]) if version else None


def _nvcc(view: View) -> Row | None:
    if view["cuda.nvcc"]:
        return ok("nvcc at {path}", path=view["cuda.nvcc"])
    return Row("skip", "nvcc: only needed to build") if view["purpose"] == "run" else None


CHECKS = (
    Check("cuda.pci", "Device", "cuda", _pci, "GPUs on the PCI bus.", facts=("cuda.pci",)),
    Check(
        "cuda.nodes",
        "Device",
        "cuda",
        _nodes,
        "The device nodes exist and open.",
        facts=("cuda.nodes", "cuda.node_access"),
    ),
    Check(
        "cuda.smi",
        "Device",
        "cuda",
        _smi,
        "nvidia-smi answers.",
        level="import",
        needs=("cuda.nodes",),
        facts=("cuda.smi.gpus", "cuda.smi.error"),
    ),
    Check(
        "cuda.driver.kernel",
        "Driver",
        "cuda",
        plain("cuda.driver.any", "driver {value}", "the kernel module's version is not visible"),
        "The kernel module's version.",
        facts=("cuda.driver.kernel",),
    ),
    Check(
        "cuda.driver.user",
        "Driver",
        "cuda",
        _user,
        "The user driver is visible.",
        facts=("cuda.driver.user", "cuda.libcuda", "cuda.driver.api"),
    ),
    Check(
        "cuda.driver.pair",
        "Driver",
        "cuda",
        _pair,
        "Kernel and user driver are of one version.",
        facts=("cuda.driver.kernel", "cuda.driver.nvml", "cuda.smi.error"),
    ),
    Check(
        "cuda.fabric",
        "Driver",
        "cuda",
        _fabric,
        "NVSwitch systems need the fabric manager.",
        facts=("cuda.nvswitch", "cuda.fabricmanager"),
    ),
    Check(
        "cuda.toolkit",
        "Toolkit",
        "cuda",
        _toolkit,
        "The toolkit that extension builders would take.",
        facts=("cuda.toolkit.version", "cuda.toolkit.home"),
    ),
    Check(
        "cuda.runtime_libs",
        "Toolkit",
        "cuda",
        lambda view: None,
        "No older system copy hides a runtime library of torch.",
        facts=("cuda.wheel_libs", "cuda.shadow", "cuda.libcuda_link"),
    ),
    Check(
        "cuda.nvcc",
        "Compilers",
        "cuda",
        _nvcc,
        "nvcc, for building and for kernels compiled on demand.",
        facts=("cuda.nvcc", "cuda.nvcc.version"),
    ),
    Check(
        "cuda.ptxas",
        "Compilers",
        "cuda",
        plain("cuda.ptxas.version", "ptxas {value}"),
        "triton's assembler knows the GPU.",
        level="import",
        facts=("cuda.ptxas.version", "cuda.gpu.archs"),
        ruling="ptxas_arch",
    ),
)
