"""What follows from the facts: values that several checks and failure kinds rest on. Pure, deterministic."""

from __future__ import annotations

import re
from typing import Any, Callable

from kvbackend.compat import rules, versions
from kvbackend.compat.data import Matrix
from kvbackend.compat.rules import Ruling
from kvbackend.compat.text import say
from kvbackend.doctor.facts import Facts, View
from kvbackend.doctor.parsers import files

_CHIP = {
    "950": "Ascend950",
    "A2": "Ascend910B",
    "A3": "Ascend910_93",
    "310P": "Ascend310P",
    "910A": "Ascend910A",
}
_OPS_FOLDERS = {
    "950": ("ascend950", "ascend910_95"),
    "A2": ("ascend910b",),
    "A3": ("ascend910_93",),
    "310P": ("ascend310p",),
    "910A": ("ascend910",),
}
_DEVICE_TYPES = {"A5": "950", "_310P": "310P"}
_ALLOC_950 = (
    "expandable_segments",
    "pinned_use_background_threads",
    "pin_memory_expandable_segments",
    "pinned_mem_register",
)


def derive(facts: Facts, matrix: Matrix, purpose: str, requested: str) -> View:
    """A view of the facts with everything that follows from them, rulings included (`ruling.<name>` is the state)."""
    view = View(facts)
    known: dict[str, Any] = {"purpose": purpose}
    view.derived = known
    for step in (_devices, _driver, _toolkit, _frameworks, _masks, _cuda, _extension, _proofs):
        step(view, known)
    known["ascend.required"] = requested == "ascend" or known["ascend.present"] or view["torch_npu.version"] is not None
    known["cuda.required"] = requested == "cuda" or known["cuda.present"]
    known["ascend.ops.newer_cann"] = _ops_for_newer_cann(view, matrix)
    for name, ruling in rulings(view, matrix).items():
        known["ruling." + name] = ruling.state if ruling else None
    return view


def rulings(view: View, matrix: Matrix) -> dict[str, Ruling | None]:
    """Every question to the matrix that this host's versions allow; None where a version is missing."""

    def ask(rule: Callable[..., Ruling], *keys: str) -> Ruling | None:
        values = [view[k] for k in keys]
        return rule(*values, matrix=matrix) if all(values) else None

    have = {
        "cann": view["ascend.cann.version"],
        "torch": view["torch.base"],
        "torch_npu": view["torch_npu.version"],
        "triton_ascend": view["triton_ascend.version"],
    }
    arch = (view["cuda.gpu.archs"] or [None])[-1]
    ptxas = view["cuda.ptxas.version"]
    vllm = view["vllm_ascend.version"]
    return {
        "driver_firmware": ask(rules.driver_firmware, "ascend.driver.any", "ascend.firmware.any"),
        "cann_driver": _vendor_driver(view) or ask(rules.cann_driver, "ascend.cann.version", "ascend.driver.any"),
        "soc_cann": ask(rules.soc_cann, "ascend.chip", "ascend.cann.version"),
        "soc_torch_npu": ask(rules.soc_torch_npu, "ascend.chip", "torch_npu.version"),
        "torch_npu_torch": rules.torch_npu_torch(view["torch.version"], view["torch_npu.version"])
        if view["torch.version"] and view["torch_npu.version"]
        else None,
        "torch_npu_cann": ask(rules.torch_npu_cann, "torch_npu.version", "ascend.cann.version"),
        "python_torch": ask(rules.python_torch, "py.version", "torch.version"),
        "numpy_cann": ask(rules.numpy_cann, "py.numpy", "ascend.cann.version"),
        "triton_ascend": ask(rules.triton_ascend_cann, "triton_ascend.version", "ascend.cann.version"),
        "vllm_ascend": rules.vllm_ascend(vllm, {k: v for k, v in have.items() if v}, matrix) if vllm else None,
        "cuda_driver": ask(rules.cuda_driver, "torch.cuda", "cuda.driver.any"),
        "torch_triton": ask(rules.torch_triton, "torch.version", "triton.version")
        if view["torch.variant"] == "cuda"
        else None,
        "ptxas_arch": rules.cuda_arch(arch, ptxas, matrix) if arch and ptxas else None,
    }


def _ops_for_newer_cann(view: View, matrix: Matrix) -> list[str] | None:
    """Vendor ops that this chip gets only with a newer CANN, each with its minimum."""
    soc, cann = view["ascend.chip"], view["ascend.cann.version"]
    if not soc or not cann:
        return None
    names = sorted({row["op"] for row in matrix.rows("op")})
    answers = {name: rules.op_cann(name, soc, cann, matrix) for name in names}
    return [
        f"{n} ({a.expected})" for n, a in answers.items() if a.state == "bad" and a.expected.startswith(">=")
    ] or None


def _vendor_driver(view: View) -> Ruling | None:
    """What the toolkit's own files say of the driver, which goes before our rows."""
    driver = view["ascend.driver.any"]
    for need in view["ascend.cann.requires"] or []:
        met = versions.within(driver, need["range"]) if need["needs"] == "driver" and driver else None
        if met is not None:
            source = "{}/version.info".format(need["by"])
            reason = say(
                "driver {driver}; {by} needs driver {range}: upgrade the driver on the host",
                driver=driver,
                by=need["by"],
                range=need["range"],
            )
            return Ruling(
                "ok" if met else "bad",
                "" if met else reason,
                "required_package_driver_version",
                source,
                driver,
                need["range"],
            )
    inner, allowed = view["ascend.driver.inner"], view["ascend.cann.compatible"]
    if inner and allowed and files.inner_compatible(inner, allowed):
        return Ruling("ok", row="compatible_version", source=view.source("ascend.cann.compatible"))
    return None


def _family(view: View) -> str | None:
    cards = view["ascend.pci"] or []
    if cards:
        return cards[0]["family"]
    names = [view["ascend.soc"] or ""] + [c["name"] for c in view["ascend.smi.chips"] or []]
    for name in (n if n.startswith("Ascend") else "Ascend" + n for n in names if n):
        row = rules.soc_row(name)
        if row:
            return row["family"]
        if name == "Ascend910":  # npu-smi's short name of an A3 chip
            return "A3"
    return None


def _devices(view: View, known: dict[str, Any]) -> None:
    nodes = view["ascend.nodes"] or []
    davinci = [n for n in nodes if re.fullmatch(r"v?davinci\d+", n)]
    chips = view["ascend.smi.chips"] or []
    known["ascend.davinci"] = davinci or None
    known["ascend.present"] = bool(davinci or view["ascend.pci"] or chips)
    known["ascend.cards"] = len(chips) or len(davinci) or None
    known["ascend.family"] = _family(view)
    known["ascend.chip"] = view["ascend.soc"] or _CHIP.get(known["ascend.family"] or "")
    access = view["ascend.node_access"] or {}
    known["ascend.denied"] = [n for n, how in sorted(access.items()) if how == "EACCES"] or None
    known["ascend.eperm"] = [n for n, how in sorted(access.items()) if how == "EPERM"] or None
    sick = view["ascend.health"] or {}
    known["ascend.alarms"] = [
        " ".join(["card", card, sick[card]["health"], *sick[card]["codes"]]) for card in sorted(sick)
    ] or None
    problem = view["ascend.smi.error"] or {}
    known["ascend.smi.kind"] = problem.get("kind")
    known["ascend.process_count"] = len(view["ascend.smi.processes"] or [])
    known["ascend.card_lost"] = bool(chips) and len(davinci) > len(chips)


def _driver(view: View, known: dict[str, Any]) -> None:
    known["ascend.driver.any"] = view["ascend.driver.version"] or view["ascend.smi.driver"]
    known["ascend.firmware.any"] = view["ascend.firmware.version"] or view["ascend.smi.firmware"]
    first = (view["lib.libascend_hal.so"] or [""])[0]
    known["ascend.hal.stub_first"] = "/devlib/" in first
    places = [
        p for p in (view["lib.libascend_hal.so"] or []) + (view["ascend.driver.hal"] or []) if "/devlib/" not in p
    ]
    known["ascend.hal.real"] = sorted(set(places)) or None
    known["ascend.hal.roots"] = len({p.partition("/lib64/")[0] for p in places})
    answers = [
        versions.between(known[version], view[ranges])
        for version, ranges in (
            ("ascend.firmware.any", "ascend.driver.accepts"),
            ("ascend.driver.any", "ascend.firmware.accepts"),
        )
        if known[version] and view[ranges]
    ]
    known["ascend.firmware.mismatch"] = False in answers if [a for a in answers if a is not None] else None


def _line(text: str | None) -> str | None:
    version = versions.parse(text)
    return ".".join(map(str, version.release[:2])) if version else None


def _toolkit(view: View, known: dict[str, Any]) -> None:
    packages = dict(view["ascend.cann.packages"] or {})
    if known["ascend.driver.any"]:
        packages["driver"] = known["ascend.driver.any"]
    unmet: dict[bool, list[str]] = {True: [], False: []}
    for need in view["ascend.cann.requires"] or []:
        version = packages.get(need["needs"])
        if version and versions.within(version, need["range"]) is False:
            text = "{} needs {} {}, here is {}".format(need["by"], need["needs"], need["range"], version)
            unmet[need["needs"] == "driver"].append(text)
    known["ascend.cann.unmet"], known["ascend.driver.unmet"] = unmet[False] or None, unmet[True] or None
    roots = view["ascend.cann.env_trees"] or {}
    known["ascend.cann.env_roots"] = len(set(roots.values()))
    known["ascend.cann.line"], known["ascend.atb.line"] = (
        _line(view["ascend.cann.version"]),
        _line(view["ascend.atb.version"]),
    )
    usable = view["ascend.cann.version"] and known["ascend.family"] and not view["ascend.cann.missing_dirs"]
    chips = view["ascend.ops.chips"] or []
    fitting = [c for c in chips if c in _OPS_FOLDERS.get(known["ascend.family"] or "", (c,))]
    known["ascend.ops.missing"] = bool(usable and not chips)
    known["ascend.ops.other_chip"] = bool(usable and chips and not fitting)
    soc, inis = view["ascend.soc"], view["ascend.cann.soc_ini"]
    known["ascend.soc_ini_missing"] = soc.lower() not in [i.lower() for i in inis] if soc and inis else None
    homes = {p[0].rpartition("/")[0] for p in (view["lib.libatb.so"], view["lib.libmki.so"]) if p}
    known["ascend.atb.mixed"] = len(homes) > 1
    loaded, active = view["torch_npu.import.ascendcl"], roots.get("ASCEND_HOME_PATH")
    known["ascend.cann.loaded_other"] = not loaded.startswith(active + "/") if loaded and active else None


def _frameworks(view: View, known: dict[str, Any]) -> None:
    known["torch.base"] = versions.base(view["torch.version"]) or None
    known["torch_npu.base"] = versions.base(view["torch_npu.version"]) or None
    version = view["torch.version"]
    known["torch.variant"] = (
        None
        if not version
        else "cuda"
        if view["torch.cuda"]
        else "rocm"
        if view["torch.hip"]
        else "cpu"
        if view["torch.folder"]
        else None
    )
    known["torch.cuda.major"] = (view["torch.cuda"] or "").split(".")[0] or None
    abi = view["torch.import.abi"]
    known["torch.cxx11_abi"] = view["torch.abi"] if abi is None else abi
    for name in ("torch", "torch_npu"):
        answer = view[name + ".import"]
        known[name + ".imports"] = None if answer is None else answer["ok"]
        known[name + ".import.error"] = None if answer is None else answer.get("error")
    real, clean = view["torch.import.file"], view["torch.folder"]
    known["torch.shadowed"] = real != clean if real and clean and known["torch.imports"] else None
    kind = view["vllm_ascend.device_type"]
    known["vllm_ascend.family"] = _DEVICE_TYPES.get(kind, kind)
    known["triton_ascend.wanted"] = rules.triton_ascend_for(view["ascend.cann.version"] or "") or "3.2.2"
    public = (view["flashinfer.version"] or "").split("+")[0]
    others = view["flashinfer.companions"] or {}
    known["flashinfer.mismatch"] = {
        n: v for n, v in sorted(others.items()) if public and v.split("+")[0] != public
    } or None


def _masks(view: View, known: dict[str, Any]) -> None:
    mask = view["env.ASCEND_RT_VISIBLE_DEVICES"]
    known["ascend.mask.malformed"] = known["ascend.mask.max"] = None
    if mask:
        good = re.fullmatch(r"\d{1,4}(,\d{1,4})*", mask)
        ids = [int(i) for i in mask.split(",")] if good else []
        known["ascend.mask.malformed"] = not good or any(a >= b for a, b in zip(ids, ids[1:]))
        known["ascend.mask.max"] = max(ids) if ids else None
    options = [o.split(":")[0].strip() for o in (view["env.PYTORCH_NPU_ALLOC_CONF"] or "").split(",") if o.strip()]
    known["env.alloc_unknown"] = [o for o in options if o not in _ALLOC_950] or None


def _cuda(view: View, known: dict[str, Any]) -> None:
    nodes = [n for n in view["cuda.nodes"] or [] if n[6:].isdigit()]
    gpus = view["cuda.smi.gpus"] or []
    known["cuda.present"] = bool(nodes or view["cuda.pci"] or gpus)
    known["cuda.driver.any"] = view["cuda.driver.kernel"] or (gpus[0]["driver"] if gpus else None)
    known["cuda.libcuda_compat"] = any("/compat/" in p for p in view["cuda.libcuda"] or [])
    known["cuda.eperm"] = [n for n, how in sorted((view["cuda.node_access"] or {}).items()) if how == "EPERM"] or None
    nvcc = view["cuda.nvcc.version"] or view["cuda.toolkit.version"]
    known["cuda.nvcc.major"] = nvcc.split(".")[0] if nvcc else None
    archs, built = view["cuda.gpu.archs"] or [], view["torch.import.archs"] or []
    known["cuda.arch_covered"] = all(covered(a, built) for a in archs) if archs and built else None
    known["cuda.gpu.capability"] = ";".join(a[3:-1] + "." + a[-1] for a in archs) or None
    ptxas, api = versions.parse(view["cuda.ptxas.version"]), versions.parse(view["cuda.driver.api"])
    known["cuda.ptx_newer"] = ptxas.release[:2] > api.release[:2] if ptxas and api else None


def covered(arch: str, built: list[str]) -> bool:
    """Whether code for `built` runs on `arch` (sm_XY): same major and no newer minor, or PTX no newer than it."""
    major, minor = int(arch[3:-1]), int(arch[-1])
    for name in built:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)", name)
        if not match:
            continue
        own = (int(match.group(2)), int(match.group(3)))
        if match.group(4):
            fits = own == (major, minor)
        elif match.group(1) == "sm":
            fits = own[0] == major and own[1] <= minor
        else:
            fits = own <= (major, minor)
        if fits:
            return True
    return False


def _extension(view: View, known: dict[str, Any]) -> None:
    libs = view["ext.libs"] or []
    known["ext.unresolved"] = sorted({n for lib in libs for n in lib.get("unresolved", [])}) or None
    known["ext.broken"] = [lib["device"] for lib in libs if not lib["elf"] or not lib["stamped"]] or None
    known["ext.old_abi"] = any(lib.get("old_abi") for lib in libs)
    arch = view["host.arch"]
    known["ext.other_machine"] = any(lib.get("machine", arch) != arch for lib in libs) if arch and libs else None
    loaded = view["ext.loaded"] or {}
    known["ext.load_errors"] = [str(loaded[d]["reason"]) for d in sorted(loaded) if loaded[d].get("reason")] or None


def _proofs(view: View, known: dict[str, Any]) -> None:
    failures = []
    for key in sorted(k for k in view.facts if k.startswith("proof.")):
        proof = view[key]
        if proof is not None and not proof_good(proof):
            failures.append("{}: {}".format(key[6:], proof.get("error") if not proof["ok"] else "the result is wrong"))
    known["proof.failed"] = failures or None


def proof_good(proof: dict[str, Any]) -> bool:
    """Whether a round trip ran, read back what it wrote, and attended within its bound."""
    if not proof.get("ok"):
        return False
    if "skipped" in proof:
        return True
    error = proof.get("error")
    return bool(proof.get("read_ok")) and (error is None or error <= proof["bound"])
