"""Checks of frameworks, kernels compiled on demand, our own libraries, the matrix and the proof."""

from __future__ import annotations

from typing import Any, Callable

from kvbackend.doctor.facts import View
from kvbackend.doctor.judge.check import Check, Row, blocked, info, listed, ok, plain, unknown
from kvbackend.doctor.judge.derive import proof_good


def _import(name: str) -> Callable[[View], Row | None]:
    key = name + ".import"

    def show(view: View) -> Row | None:
        if view.state(key) == "timeout":
            return blocked("import {name} did not end ({error})", name=name, error=view.error(key))
        answer = view[key]
        if answer is None:
            return None
        return (
            ok("import {name} works", name=name)
            if answer["ok"]
            else unknown("import {name} fails: {error}", name=name, error=answer.get("error", ""))
        )

    return show


def _variant(view: View) -> Row | None:
    kind = view["torch.variant"]
    if kind is None:
        return None
    if kind == "cpu":
        return ok("CPU build")
    if kind == "cuda" and not view["cuda.present"] and not view["ascend.present"]:
        return info("torch is a CUDA build and no NVIDIA device is seen here")
    return ok("CUDA {value} build", value=view["torch.cuda"]) if kind == "cuda" else ok("ROCm build")


def _npu_cann(view: View) -> Row | None:
    loaded = view["torch_npu.import.cann"]
    return ok("torch_npu loads CANN {value}", value=loaded) if loaded else None


def _owner(view: View) -> Row | None:
    ours, theirs = view["triton_ascend.version"], view["triton.version"]
    if ours and theirs:
        return info("triton {triton} and triton-ascend {ascend} share one folder", triton=theirs, ascend=ours)
    if ours:
        return ok("triton-ascend {value}", value=ours)
    return ok("triton {value}", value=theirs) if theirs else None


def _cxx(view: View) -> Row | None:
    path = view["host.cxx"]
    if path:
        version = view["host.cxx.version"] or view["host.cxx_major"]
        return (
            ok("C++ compiler {path}, release {version}", path=path, version=version)
            if version
            else ok("C++ compiler {path}", path=path)
        )
    if view["purpose"] == "run":
        return Row("skip", "C++ compiler: only needed to build")
    status = "fail" if view["purpose"] == "build" else "warn"
    return Row(status, "no C++ compiler on PATH; building needs one: install g++")


def _present(view: View) -> Row | None:
    if view["ext.folder"] is None:
        return unknown("kvbackend is not installed in this tree")
    libs = view["ext.libs"]
    if not libs:
        return info(
            "no compiled kernels; ops run on the slow torch reference: build them with pip install --no-build-isolation"
        )
    return ok("kernels for {devices}", devices=listed([lib["device"] for lib in libs]))


def _stamp(view: View) -> Row | None:
    loaded = view["ext.loaded"]
    if not loaded:
        return None
    count = sum(len(entry["ops"]) for entry in loaded.values() if not entry["reason"])
    return ok("{count} native kernels load", count=count)


def _symbols(view: View) -> Row | None:
    return ok("all symbols resolve") if view["ext.libs"] and view["torch.folder"] else None


def _table(view: View) -> Row | None:
    table = view["ops.table"]
    if table is None:
        error = view.error("ops.table")
        return unknown("no table of ops: {error}", error=error) if error else None
    ops = {row["op"] for row in table}
    native = {row["op"] for row in table if row["status"] == "runs"}
    unproven = {row["op"] for row in table if row["status"] == "unproven"} - native
    if unproven:
        return ok(
            "{ops} ops: {native} with a kernel here, {unproven} more need device proof, the rest on the reference",
            ops=len(ops),
            native=len(native),
            unproven=len(unproven),
        )
    return ok(
        "{ops} ops: {native} with a kernel here, the rest on the torch reference",
        ops=len(ops),
        native=len(native),
    )


def _proof(view: View) -> Row | None:
    names = sorted(k for k in view.facts if k.startswith("proof."))
    late = [n[6:] for n in names if view.state(n) == "timeout"]
    if late:
        return blocked("no end of the round trip on {cards}", cards=listed(late))
    good = [f"{n[6:]} ({_how(view[n])})" for n in names if view[n] is not None and proof_good(view[n])]
    return (
        ok("write, attention and read-back agree with the reference on {cards}", cards=listed(good)) if good else None
    )


def _how(proof: dict[str, Any]) -> str:
    if "skipped" in proof:
        return proof["skipped"]
    backends = ", ".join("{} by {}".format(*pair) for pair in sorted((proof.get("backends") or {}).items()))
    return backends if proof.get("error") is None else "{}, error {:.1e}".format(backends, proof["error"])


def _versions(template: str, *keys: str) -> Callable[[View], Row | None]:
    def show(view: View) -> Row | None:
        values = [view[k] for k in keys]
        return ok(template, a=values[0], b=values[1]) if all(values) else None

    return show


def _newer_ops(view: View) -> Row | None:
    ops = view["ascend.ops.newer_cann"]
    return info("vendor ops that need a newer CANN: {ops}", ops=listed(ops)) if ops else None


def _matrix(
    id: str,
    backend: str,
    ruling: str,
    about: str,
    template: str,
    keys: tuple[str, ...],
    bad: str = "fail",
    unknown_warns: bool = False,
) -> Check:
    return Check(
        "matrix." + id,
        "Matrix",
        backend,
        _versions(template, *keys),
        about,
        facts=keys,
        ruling=ruling,
        bad=bad,
        unknown_warns=unknown_warns,
    )


CHECKS = (
    Check(
        "torch.version",
        "Frameworks",
        "any",
        plain("torch.version", "torch {value}", "torch is not installed"),
        "torch is installed.",
        facts=("torch.version",),
    ),
    Check(
        "torch.variant",
        "Frameworks",
        "any",
        _variant,
        "torch is of the right kind for this host.",
        needs=("torch.version",),
        facts=("torch.cuda", "cuda.gpu.archs", "torch.import.archs"),
    ),
    Check(
        "torch_npu.pair",
        "Frameworks",
        "ascend",
        plain("torch_npu.version", "torch_npu {value}", "torch_npu is not installed"),
        "torch_npu is for this torch.",
        needs=("torch.version",),
        facts=("torch.version", "torch_npu.version"),
        ruling="torch_npu_torch",
    ),
    Check(
        "torch.import",
        "Frameworks",
        "any",
        _import("torch"),
        "torch imports in a clean child.",
        level="import",
        needs=("torch.version", "torch.variant"),
        facts=("torch.import", "torch.import.real"),
    ),
    Check(
        "torch_npu.import",
        "Frameworks",
        "ascend",
        _import("torch_npu"),
        "torch_npu imports in a child.",
        level="import",
        needs=(
            "torch.import",
            "torch_npu.pair",
            "ascend.cann.active",
            "ascend.driver.libs",
            "env.cann_consistent",
            "lib.stub_hal",
        ),
        facts=("torch_npu.import",),
    ),
    Check(
        "torch_npu.cann",
        "Frameworks",
        "ascend",
        _npu_cann,
        "torch_npu loads the CANN that the environment names.",
        needs=("ascend.cann.active",),
        facts=("torch_npu.import.cann", "torch_npu.import.ascendcl"),
    ),
    Check(
        "torch.abi",
        "Frameworks",
        "any",
        plain("torch.cxx11_abi", "C++ ABI {value}"),
        "Extensions share torch's C++ ABI.",
        needs=("torch.version",),
        facts=("torch.abi", "torch.import.abi"),
    ),
    Check(
        "triton.owner",
        "Compilers",
        "any",
        _owner,
        "One package owns the folder triton/.",
        facts=("triton.version", "triton_ascend.version", "triton.backends"),
    ),
    Check(
        "triton.match",
        "Compilers",
        "ascend",
        lambda view: None,
        "triton-ascend is for this CANN.",
        needs=("ascend.cann.active",),
        facts=("triton_ascend.version",),
        ruling="triton_ascend",
        unknown_warns=True,
    ),
    Check(
        "host.cxx",
        "Compilers",
        "any",
        _cxx,
        "A C++ compiler, for building.",
        facts=("host.cxx", "host.cxx_major"),
    ),
    Check(
        "ext.present",
        "kvbackend",
        "any",
        _present,
        "Our compiled kernels are installed.",
        facts=("ext.libs", "ext.folder"),
    ),
    Check(
        "ext.arch",
        "kvbackend",
        "any",
        lambda view: None,
        "Our kernels are for this processor.",
        facts=("ext.libs", "host.arch"),
    ),
    Check(
        "ext.symbols",
        "kvbackend",
        "any",
        _symbols,
        "What our kernels need of torch and the system is there.",
        needs=("torch.version",),
        facts=("ext.libs", "ext.missing_torch", "ext.missing_npu"),
    ),
    Check(
        "ext.stamp",
        "kvbackend",
        "any",
        _stamp,
        "Our kernels are whole, carry their stamp and load.",
        needs=("torch.import", "ext.symbols", "ext.arch"),
        facts=("ext.libs", "ext.loaded"),
    ),
    Check(
        "ext.ops",
        "kvbackend",
        "any",
        _table,
        "What each op would run on here.",
        level="import",
        needs=("torch.import",),
        facts=("ops.table",),
    ),
    _matrix(
        "cann-driver",
        "ascend",
        "cann_driver",
        "The driver supports this CANN.",
        "CANN {a} with driver {b}",
        ("ascend.cann.version", "ascend.driver.any"),
        unknown_warns=True,
    ),
    Check(
        "matrix.ops",
        "Matrix",
        "ascend",
        _newer_ops,
        "Vendor ops whose minimum CANN is not reached here.",
        facts=("ascend.cann.version", "ascend.soc"),
    ),
    _matrix(
        "soc-cann",
        "ascend",
        "soc_cann",
        "This CANN knows the chip.",
        "{a} with CANN {b}",
        ("ascend.chip", "ascend.cann.version"),
    ),
    _matrix(
        "soc-torch_npu",
        "ascend",
        "soc_torch_npu",
        "This torch_npu knows the chip.",
        "{a} with torch_npu {b}",
        ("ascend.chip", "torch_npu.version"),
    ),
    _matrix(
        "torch_npu-cann",
        "ascend",
        "torch_npu_cann",
        "torch_npu and CANN were published together.",
        "torch_npu {a} with CANN {b}",
        ("torch_npu.version", "ascend.cann.version"),
        unknown_warns=True,
    ),
    _matrix(
        "python-torch",
        "any",
        "python_torch",
        "This torch is published for this Python.",
        "Python {a} with torch {b}",
        ("py.version", "torch.version"),
        bad="warn",
    ),
    _matrix(
        "vllm_ascend",
        "ascend",
        "vllm_ascend",
        "vllm-ascend's pins are met.",
        "vllm-ascend {a} with CANN {b}",
        ("vllm_ascend.version", "ascend.cann.version"),
        bad="warn",
    ),
    _matrix(
        "cuda-driver",
        "cuda",
        "cuda_driver",
        "The driver reaches the floor of torch's CUDA.",
        "CUDA {a} with driver {b}",
        ("torch.cuda", "cuda.driver.any"),
    ),
    _matrix(
        "torch-triton",
        "cuda",
        "torch_triton",
        "triton is the release that torch pins.",
        "torch {a} with triton {b}",
        ("torch.version", "triton.version"),
        bad="warn",
    ),
    Check(
        "proof.roundtrip",
        "Proof",
        "any",
        _proof,
        "One tiny write, attention and read-back per card.",
        level="device",
        needs=("ext.stamp", "torch_npu.import"),
        facts=(),
    ),
)
