"""Facts of kvbackend's own compiled libraries, `kvbackend/_lib/libkvbackend_<device>.so`, read without loading them."""

from __future__ import annotations

import os
import re
from typing import Any

from kvbackend.doctor import facts, loader
from kvbackend.doctor.collect import python
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host

STAMP = "kvbackend_stamp"
_NPU = re.compile(r"_ZNK?(7c10_npu|6at_npu)")
_TORCH = re.compile(r"_ZNK?(3c10|5torch|2at)|aoti_torch_|torch_")


def package(host: Host) -> str:
    """The folder of the kvbackend that is running, or of the one in a tree."""
    if host.live:
        return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return python.package_folder(host, "kvbackend")


def libraries(host: Host) -> Facts:
    """What each library needs and offers, and what of that resolves nowhere."""
    folder = package(host)
    if not folder:
        return {"ext.libs": facts.absent("site-packages")}
    torch_lib = python.package_folder(host, "torch") + "/lib"
    libs: list[dict[str, Any]] = []
    for name in host.list(folder + "/_lib"):
        match = re.fullmatch(r"libkvbackend_(\w+)\.so", name)
        if match:
            libs.append(_library(host, f"{folder}/_lib/{name}", match.group(1), torch_lib))
    lacking = _missing_symbols(host, libs)
    found = {
        "ext.missing_npu": facts.maybe([n for n in lacking if _NPU.match(n)], "dynamic symbols"),
        "ext.missing_torch": facts.maybe([n for n in lacking if not _NPU.match(n)], "dynamic symbols"),
        "ext.folder": facts.value(folder),
        "ext.libs": facts.maybe(libs, folder + "/_lib"),
    }
    for key in ("glibcxx", "glibc"):
        needs = [lib[key] for lib in libs if lib.get(key)]
        found["ext.needs_" + key] = facts.maybe(
            max(needs, key=lambda v: [int(n) for n in v.split(".")], default=""), folder + "/_lib"
        )
    return found


def _missing_symbols(host: Host, libs: list[dict[str, Any]]) -> list[str]:
    """Symbols of torch and torch_npu that our libraries need and the installed ones do not have."""
    folders = [python.package_folder(host, p) for p in ("torch", "torch_npu")]
    if not folders[0]:
        return []
    paths = [
        folders[0] + f"/lib/lib{n}.so" for n in ("c10", "torch_cpu", "torch", "torch_python", "c10_cuda", "torch_cuda")
    ]
    paths += (
        [f"{folders[1]}/lib/{n}" for n in host.list(folders[1] + "/lib") if n.endswith(".so")] if folders[1] else []
    )
    offered = [lib for lib in (loader.read(host, p) for p in paths) if lib]
    found = set()
    for entry in libs:
        library = loader.read(host, entry["path"])
        names = (
            {n for n in library.undefined if _TORCH.match(n) or (_NPU.match(n) and folders[1])} if library else set()
        )
        found |= {n for n in names if not any(n in lib.defined for lib in offered)}
    return sorted(found)[:20] if offered else []


def _library(host: Host, path: str, device: str, torch_lib: str) -> dict[str, Any]:
    library = loader.read(host, path)
    if library is None:
        return {"device": device, "path": path, "elf": False}
    old_abi = any(
        re.match(r"_ZN(K?)(3c10|5torch|2at|4c10_npu|6at_npu)", n) and re.search(r"RKSs|ESs|Ss$", n)
        for n in library.undefined
    )
    archs = sorted({m.decode() for m in re.findall(rb"\bsm_\d{2,3}a?\b", host.map(path))}) if device == "cuda" else []
    return {
        "device": device,
        "path": path,
        "elf": True,
        "machine": library.machine,
        "stamped": library.has(STAMP),
        "unresolved": loader.unresolved(host, path, (torch_lib,)),
        "old_abi": old_abi,
        "archs": archs,
        "glibcxx": library.newest("GLIBCXX_3.4"),
        "glibc": library.newest("GLIBC_2"),
    }
