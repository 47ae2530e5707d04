"""Facts of the Ascend stack, from files: nodes, driver, firmware, CANN, operator packages, NNAL, compilers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvbackend.compat import versions
from kvbackend.doctor import facts, loader
from kvbackend.doctor.collect import python
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host
from kvbackend.doctor.parsers import files

ARCHES = ("x86_64-linux", "aarch64-linux")
_NODE = re.compile(r"(v?davinci\d+|davinci_manager(_docker)?|devmm_svm|hisi_hdc|dvpp_cmdlist|svm0|uburma|ummu)")
_INSTALL_INFO = "/etc/Ascend/ascend_cann_install.info"
_KERNELS = "/built-in/op_impl/ai_core/tbe/kernel"
# entry points that the NPU backend calls; which of them a toolkit lacks is a fact, not a fault
ACLNN = (
    "aclnnFusedInferAttentionScoreV5",
    "aclnnSparseFlashAttention",
    "aclnnLightningIndexer",
    "aclnnQuantLightningIndexer",
    "aclnnScatterPaKvCache",
    "aclnnGatherPaKvCache",
    "aclnnAttentionUpdate",
    "aclnnSparseFlashMla",
    "aclnnMixedQuantSparseFlashMla",
    "aclnnLightningIndexerV2",
)
LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libascend_hal.so",
    "libatb.so",
    "libmki.so",
    "libasdops.so",
    "libc_sec.so",
)


def nodes(host: Host) -> Facts:
    """Device nodes, and whether each of them really opens."""
    names = [n for n in host.list("/dev") if _NODE.fullmatch(n)]
    access = {n: host.try_open("/dev/" + n) or "ok" for n in names if n not in ("uburma", "ummu")}
    return {
        "ascend.nodes": facts.maybe(names, "/dev"),
        "ascend.node_access": facts.maybe(access, "open(O_RDWR)"),
    }


def driver_root(host: Host) -> str:
    """The driver's folder, where its installer says it is."""
    pairs = files.key_values(host.text("/etc/ascend_install.info"))
    return pairs.get("Driver_Install_Path_Param", "/usr/local/Ascend").rstrip("/") + "/driver"


def driver(host: Host) -> Facts:
    """Driver and firmware versions with the ranges they accept of each other; user libraries."""
    root = driver_root(host)
    install = host.read("/etc/ascend_install.info")
    found: Facts = {
        "ascend.driver.root": facts.value(root, "/etc/ascend_install.info"),
        "ascend.driver.folder": facts.maybe(root if host.is_dir(root) else "", root),
    }
    if install.state == "value":
        has_key = "Driver_Install_Path_Param" in files.key_values(install.text)
        found["ascend.driver.path_key"] = facts.value(has_key, "/etc/ascend_install.info")
    _version_file(host, root + "/version.info", "ascend.driver", "firmware", found)
    _version_file(host, root.rpartition("/")[0] + "/firmware/version.info", "ascend.firmware", "driver", found)
    hal = [p for p in (root + "/lib64/driver/libascend_hal.so", root + "/lib64/libascend_hal.so") if host.exists(p)]
    found["ascend.driver.hal"] = facts.maybe(hal, root)
    dcmi = "/usr/local/dcmi/libdcmi.so"
    found["ascend.driver.dcmi"] = facts.maybe(dcmi if host.exists(dcmi) else "", dcmi)
    smi = [
        p for p in (host.which("npu-smi"), "/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi") if p and host.exists(p)
    ]
    found["ascend.smi.path"] = facts.maybe(smi[0] if smi else "", "PATH")
    return found


def _version_file(host: Host, path: str, prefix: str, other: str, found: Facts) -> None:
    reading = host.read(path)
    info = files.version_info(reading.text) if reading.state == "value" else None
    if info is None:
        state = {"value": "unparsed"}.get(reading.state, reading.state)
        found[prefix + ".version"] = (
            facts.absent(path) if state == "absent" else facts.failed(state, path, reading.error, reading.text)
        )
        return
    found[prefix + ".version"] = facts.value(info["version"], path, raw=reading.text[: facts.RAW_LIMIT])
    found[prefix + ".inner"] = facts.maybe(info["inner"], path)
    found[prefix + ".accepts"] = facts.maybe(info[other], path)


def libraries(host: Host) -> Facts:
    """For each library that matters: the first place the loader would take it from, and all the others."""
    found: Facts = {}
    for soname in LIBRARIES:
        places = [host.real(p) for p in loader.find(host, soname)]
        found["lib." + soname] = facts.maybe(places, "LD_LIBRARY_PATH, ld.so.cache, default folders")
    return found


def trees(host: Host) -> list[dict[str, Any]]:
    """Every CANN tree with who named it; trees that are one real folder are one tree."""

    def scan() -> list[dict[str, Any]]:
        env = host.environ
        named = [(env[v], v) for v in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_AICPU_PATH") if env.get(v)]
        if env.get("ASCEND_OPP_PATH"):
            named.append((env["ASCEND_OPP_PATH"].rstrip("/").rpartition("/")[0], "ASCEND_OPP_PATH"))
        for folder in host.paths("LD_LIBRARY_PATH"):
            if host.exists(folder + "/libascendcl.so"):
                named.append((_root_of(folder), "LD_LIBRARY_PATH"))
        info = files.key_values(host.text(_INSTALL_INFO))
        named += [(info[k], _INSTALL_INFO) for k in ("Toolkit_InstallPath", "Install_Path") if info.get(k)]
        named += [(p, "disk") for p in _well_known(host)]
        found: dict[str, dict[str, Any]] = {}
        for path, by in named:
            real = host.real(path)
            if path.startswith("/") and host.is_dir(path):
                tree = found.setdefault(real, {"path": real, "by": [], **_release(host, real)})
                if by not in tree["by"]:
                    tree["by"].append(by)
        return list(found.values())

    return host.memo("trees", scan)


def _root_of(library_folder: str) -> str:
    """The tree of a `lib64` folder, which may lie below `runtime` or an architecture folder."""
    root = library_folder.rstrip("/").rpartition("/")[0]
    while root.rpartition("/")[2] in (*ARCHES, "runtime", "fwkacllib", "devlib"):
        root = root.rpartition("/")[0]
    return root


def _well_known(host: Host) -> list[str]:
    bases = ["/usr/local/Ascend", host.environ.get("HOME", "/root") + "/Ascend", "/home/ma-user/Ascend"]
    if host.environ.get("CONDA_PREFIX"):
        bases.append(host.environ["CONDA_PREFIX"] + "/Ascend")
    found = []
    for base in bases:
        for name in host.list(base):
            if name == "cann" or (name.startswith("cann-") and name[5:6].isdigit()):
                found.append(base + "/" + name)
            elif name in ("ascend-toolkit", "nnae", "nnrt"):
                found += [
                    f"{base}/{name}/{n}" for n in host.list(base + "/" + name) if n == "latest" or versions.parse(n)
                ]
    return found


def _release(host: Host, tree: str) -> dict[str, Any]:
    """The release of a tree, from the first file that states it, with what that file says of compatibility."""
    for name in ("ascend_toolkit_install.info", "ascend_nnae_install.info", "ascend_nnrt_install.info"):
        for folder in [tree + "/" + a for a in ARCHES] + [tree]:
            info = files.install_info(host.text(folder + "/" + name))
            if info:
                return {
                    "version": info["version"],
                    "file": folder + "/" + name,
                    "inner": info["inner"],
                    "compatible": info["compatible"],
                }
    packages = files.version_cfg(host.text(tree + "/version.cfg"))
    running = packages.get("toolkit", packages.get("runtime", {})).get("running")
    if running:
        return {"version": running[0], "file": tree + "/version.cfg", "inner": "", "compatible": []}
    for name in ("share/info/runtime", "compiler", "runtime", "toolkit", "opp"):
        path = f"{tree}/{name}/version.info"
        info = files.version_info(host.text(path))
        if info and info["release"]:
            return {"version": info["release"], "file": path, "inner": "", "compatible": []}
    return {"version": "", "file": "", "inner": "", "compatible": []}


def active_tree(host: Host) -> dict[str, str]:
    """The tree that a process of this environment would use, and why."""
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        path = host.environ.get(variable)
        if path:
            return {"path": path.rstrip("/"), "by": variable}
    if host.environ.get("ASCEND_OPP_PATH"):
        return {
            "path": host.environ["ASCEND_OPP_PATH"].rstrip("/").rpartition("/")[0],
            "by": "ASCEND_OPP_PATH",
        }
    tree = next((t for t in trees(host) if "LD_LIBRARY_PATH" in t["by"]), None)
    return {"path": tree["path"], "by": "LD_LIBRARY_PATH"} if tree else {}


def cann(host: Host, aclnn: Sequence[str] = ACLNN) -> Facts:
    """Trees, the active one, its packages, and the operator package for each chip."""
    found: Facts = {
        "ascend.cann.trees": facts.maybe(
            [{"path": t["path"], "version": t["version"], "by": t["by"]} for t in trees(host)],
            "environment, install files, disk",
        )
    }
    old = "/usr/local/Ascend/ascend-toolkit"
    new = [n for n in host.list("/usr/local/Ascend") if n == "cann" or n.startswith("cann-")]
    found["ascend.cann.old_layout"] = facts.maybe(old if host.exists(old) else "", old)
    found["ascend.cann.new_layout"] = facts.maybe(new, "/usr/local/Ascend")
    active = active_tree(host)
    found["ascend.cann.active"] = facts.maybe(active)
    found["ascend.cann.env_trees"] = facts.maybe(_env_trees(host), "environment")
    opp = host.environ.get("ASCEND_OPP_PATH", "")
    found["ascend.cann.opp"] = facts.maybe(opp if host.is_dir(opp) else "", "ASCEND_OPP_PATH")
    if not active:
        found["ascend.cann.version"] = facts.absent("no tree in this environment")
        return found
    home = active["path"]
    declared = next((t for t in trees(host) if _INSTALL_INFO in t["by"]), None)
    found["ascend.cann.declared"] = facts.maybe((declared or {}).get("version"), _INSTALL_INFO)
    release = _release(host, home)
    found["ascend.cann.version"] = facts.maybe(release["version"], release["file"] or home)
    found["ascend.cann.inner"] = facts.maybe(release["inner"], release["file"])
    found["ascend.cann.compatible"] = facts.maybe(release["compatible"], release["file"])
    missing = [d for d in ("", "/runtime", "/compiler") if not host.is_dir(home + d)]
    found["ascend.cann.missing_dirs"] = facts.maybe([home + d for d in missing], home)
    _packages(host, home, found)
    _operators(host, home, aclnn, found)
    places = [f"{d}/tikcpp/ascendc_kernel_cmake" for d in ("tools", "compiler", *ARCHES)]
    cmake = [p for p in places if host.is_dir(home + "/" + p)]
    found["ascend.cann.cmake_dir"] = facts.maybe(home + "/" + cmake[0] if cmake else "", home)
    return found


def _env_trees(host: Host) -> dict[str, str]:
    """Variable -> real root of the tree that it names."""
    found = {}
    for variable, inside in (
        ("ASCEND_HOME_PATH", ""),
        ("ASCEND_TOOLKIT_HOME", ""),
        ("ASCEND_AICPU_PATH", ""),
        ("ASCEND_OPP_PATH", "opp"),
        ("TOOLCHAIN_HOME", "toolkit"),
    ):
        path = host.environ.get(variable, "").rstrip("/")
        if path.startswith("/") and path.endswith(inside):
            found[variable] = host.real(path[: len(path) - len(inside)].rstrip("/") or "/")
    return found


def _packages(host: Host, home: str, found: Facts) -> None:
    packages: dict[str, str] = {}
    requires: list[dict[str, str]] = []
    folders = [
        (n, f"{home}/{n}/version.info")
        for n in ("runtime", "compiler", "opp", "toolkit", "hccl", "aoe", "ncs", "opp_kernel")
    ]
    share = home + "/share/info"
    folders += [(n, f"{share}/{n}/version.info") for n in host.list(share)]
    for name, path in folders:
        info = files.version_info(host.text(path))
        if info:
            packages[files.package_name(name)] = str(info["version"])
            requires += [
                {"by": files.package_name(name), "needs": needs, "range": bounds}
                for needs, bounds in info["requires"].items()
            ]
    found["ascend.cann.packages"] = facts.maybe(packages, home)
    found["ascend.cann.requires"] = facts.maybe(requires, home)


def _operators(host: Host, home: str, aclnn: Sequence[str], found: Facts) -> None:
    opp = host.environ.get("ASCEND_OPP_PATH", home + "/opp").rstrip("/")
    info = next(
        filter(
            None,
            (
                files.install_info(host.text(d + "/ascend_ops_install.info"))
                for d in [home + "/" + a for a in ARCHES] + [home]
            ),
        ),
        None,
    )
    kernel = files.version_info(host.text(home + "/opp_kernel/version.info"))
    release = (info or {}).get("version") or (kernel or {}).get("release")
    found["ascend.ops.version"] = facts.maybe(release, home)
    chips = {n for d in ("/config", "") for n in host.list(opp + _KERNELS + d) if n.startswith("ascend")}
    found["ascend.ops.chips"] = facts.maybe(sorted(chips), opp + _KERNELS)
    folders = [f"{home}/{a}/data/platform_config" for a in ARCHES] + [home + "/data/platform_config"]
    names = {n[:-4] for d in folders for n in host.list(d) if n.endswith(".ini")}
    found["ascend.cann.soc_ini"] = facts.maybe(sorted(names), folders[0])
    aicpu = host.environ.get("ASCEND_AICPU_PATH", home).rstrip("/")
    found["ascend.ops.aicpu"] = facts.value(
        host.is_dir(aicpu + "/opp/built-in/op_impl/aicpu") or host.is_dir(opp + "/built-in/op_impl/aicpu"),
        aicpu,
    )
    libraries = [n for n in host.list(home + "/lib64") if re.fullmatch(r"libopapi\w*\.so", n)]
    offered = [lib for lib in (loader.read(host, home + "/lib64/" + n) for n in libraries) if lib]
    lacking = [a for a in aclnn if not any(lib.has(a + "GetWorkspaceSize") for lib in offered)]
    found["ascend.ops.aclnn_missing"] = facts.maybe(lacking if libraries else [], home + "/lib64/libopapi*.so")
    custom = [
        f + "/" + n + d
        for f in python.site_folders(host)
        for n in host.list(f)
        if "ascend" in n or "npu" in n
        for d in ("/vendors", "/_cann_ops_custom/vendors")
    ]
    loose = [p for p in custom if host.is_dir(p) and p not in host.environ.get("ASCEND_CUSTOM_OPP_PATH", "")]
    found["ascend.ops.custom_unregistered"] = facts.maybe(loose, "ASCEND_CUSTOM_OPP_PATH")


def atb(host: Host) -> Facts:
    """NNAL's trees, the selected one, its version and C++ ABI."""
    base = "/usr/local/Ascend/nnal/atb"
    installed = {}
    for name in host.list(base):
        version = files.atb_version(host.text(f"{base}/{name}/version.info"))
        if version:
            installed[host.real(base + "/" + name)] = version
    home = host.environ.get("ATB_HOME_PATH", "").rstrip("/")
    match = re.search(r"cxx_abi_([01])$", home)
    version = files.atb_version(host.text(home + "/../../version.info")) if home else ""
    return {
        "ascend.atb.trees": facts.maybe([{"path": p, "version": v} for p, v in sorted(installed.items())], base),
        "ascend.atb.home": facts.maybe(home, "ATB_HOME_PATH"),
        "ascend.atb.exists": facts.value(host.is_dir(home), home) if home else facts.absent("ATB_HOME_PATH"),
        "ascend.atb.version": facts.maybe(version, home + "/../../version.info"),
        "ascend.atb.abi": facts.maybe(int(match.group(1)) if match else None, "ATB_HOME_PATH"),
    }


def compilers(host: Host) -> Facts:
    """bisheng and bishengir-compile at the places where triton-ascend looks for them."""
    home, extra = active_tree(host).get("path", ""), host.environ.get("TRITON_NPU_COMPILER_PATH", "")
    inside = python.package_folder(host, "triton") + "/backends/ascend/bishengir/bin"
    ir = [inside + "/bishengir-compile", host.which("bishengir-compile"), extra + "/npuc"]
    clang = [host.which("bisheng"), extra + "/ccec"]
    clang += (
        [
            home + d
            for d in (
                "/tools/bisheng_compiler/bin/bisheng",
                "/tools/ccec_compiler/bin/bisheng",
                "/compiler/ccec_compiler/bin/bisheng",
            )
        ]
        if home
        else []
    )
    return {
        "ascend.bisheng": facts.maybe(next((p for p in clang if p and host.exists(p)), ""), "PATH and CANN"),
        "ascend.bishengir": facts.maybe(
            next((p for p in ir if p and host.exists(p)), ""), "triton, PATH, TRITON_NPU_COMPILER_PATH"
        ),
    }
