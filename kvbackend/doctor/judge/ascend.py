"""Checks of the Ascend stack: device, driver, toolkit, NNAL, libraries, compilers."""

from __future__ import annotations

from typing import Callable

from kvbackend.doctor.facts import View
from kvbackend.doctor.judge.check import Check, Row, blocked, info, listed, ok, plain, unknown


def _pci(view: View) -> Row | None:
    cards = view["ascend.pci"]
    if not cards:
        return unknown("no Ascend chip on the PCI bus of this view; a container may hide it")
    return ok(
        "{count} x {family} (PCI 19e5:{device})",
        count=len(cards),
        family=_family(cards[0]["family"]),
        device=cards[0]["device"],
    )


def _family(name: str) -> str:
    return name if name.startswith("A") else "Ascend " + name


def _nodes(view: View) -> Row | None:
    return (
        ok("nodes {nodes}", nodes=listed(view["ascend.nodes"])) if view["ascend.nodes"] else unknown("no device nodes")
    )


def _access(view: View) -> Row | None:
    access = view["ascend.node_access"]
    if not access:
        return None
    odd = [f"{n} ({how})" for n, how in sorted(access.items()) if how not in ("ok", "EACCES", "EPERM")]
    return unknown("nodes that do not open: {nodes}", nodes=listed(odd)) if odd else ok("all openable")


def _smi(view: View) -> Row | None:
    chips = view["ascend.smi.chips"]
    if chips:
        return ok("npu-smi: {count} x {name}", count=len(chips), name=chips[0]["name"])
    state = view.state("ascend.smi.chips")
    if state == "timeout":
        return blocked("npu-smi gave no answer ({error})", error=view.error("ascend.smi.chips"))
    if state == "absent":
        return unknown("npu-smi is not here; health and SoC name stay unknown")
    return unknown("npu-smi: {error}", error=view.error("ascend.smi.chips"))


def _health(view: View) -> Row | None:
    alarms = view["ascend.alarms"]
    if alarms:
        return info("{cards}", cards=listed(alarms))
    return ok("health OK") if view["ascend.smi.chips"] else None


def _firmware(view: View) -> Row | None:
    version = view["ascend.firmware.any"]
    return (
        ok("firmware {value}", value=version)
        if version
        else unknown("firmware: version.info is not visible here (normal in a container)")
    )


def _driver(view: View) -> Row | None:
    version = view["ascend.driver.any"]
    if version:
        return ok("driver {value}", value=version)
    if view.state("ascend.driver.version") in ("unreadable", "unparsed"):
        return unknown("driver: version.info cannot be read ({state})", state=view.state("ascend.driver.version"))
    return unknown("driver: version.info is not visible here (normal in a container)")


def _pair(view: View) -> Row | None:
    word = view["ascend.smi.compatibility"]
    return ok("driver and firmware fit") if word == "OK" or view["ascend.firmware.mismatch"] is False else None


def _hal(view: View) -> Row | None:
    return (
        ok("user libraries in {root}", root=view["ascend.hal.real"][0].partition("/lib64")[0])
        if view["ascend.hal.real"]
        else unknown("no driver library libascend_hal.so found")
    )


def _trees(view: View) -> Row | None:
    trees, declared, version = view["ascend.cann.trees"], view["ascend.cann.declared"], view["ascend.cann.version"]
    if not trees:
        return unknown("no CANN tree found on this host")
    if declared and version and declared != version:
        return info(
            "the last installation was CANN {declared}, this environment selects {version}",
            declared=declared,
            version=version,
        )
    if len(trees) == 1:
        return None
    return ok("{count} CANN trees: {trees}", count=len(trees), trees=listed([t["path"] for t in trees]))


def _active(view: View) -> Row | None:
    active = view["ascend.cann.active"]
    if not active:
        return unknown("no CANN tree is selected by this environment")
    return ok(
        "CANN {version} at {path} (from {by})",
        version=view["ascend.cann.version"] or "?",
        path=active["path"],
        by=active["by"],
    )


def _required(view: View) -> Row | None:
    needs = view["ascend.cann.requires"]
    return ok("packages fit each other") if needs and not view["ascend.cann.unmet"] else None


def _ini(view: View) -> Row | None:
    soc = view["ascend.soc"]
    return ok("knows {soc}", soc=soc) if soc and view["ascend.soc_ini_missing"] is False else None


def _ops(view: View) -> Row | None:
    chips = view["ascend.ops.chips"]
    if not chips:
        return unknown("no operator package found") if view["ascend.cann.version"] else None
    version = view["ascend.ops.version"]
    return (
        ok("operator package for {chips} ({version})", chips=listed(chips), version=version)
        if version
        else ok("operator package for {chips}", chips=listed(chips))
    )


def _atb_tree(view: View) -> Row | None:
    if view["ascend.atb.home"]:
        return (
            ok("NNAL at {path}", path=view["ascend.atb.home"])
            if view["ascend.atb.exists"] is not False
            else unknown("ATB_HOME_PATH names {path}, which is not there", path=view["ascend.atb.home"])
        )
    return unknown("NNAL is not selected; operators of the atb namespace will be absent")


def _library(soname: str) -> Callable[[View], Row | None]:
    def show(view: View) -> Row | None:
        places = view["lib." + soname]
        if not places:
            return None
        return (
            ok(
                "{name} from {path}, {count} further copies",
                name=soname,
                path=places[0],
                count=len(places) - 1,
            )
            if len(places) > 1
            else ok("{name} from {path}", name=soname, path=places[0])
        )

    return show


CHECKS = (
    Check(
        "ascend.pci",
        "Device",
        "ascend",
        _pci,
        "Chips on the PCI bus; needs no vendor software.",
        facts=("ascend.pci",),
    ),
    Check(
        "ascend.nodes",
        "Device",
        "ascend",
        _nodes,
        "The device nodes that the chip family needs.",
        facts=("ascend.nodes",),
    ),
    Check(
        "ascend.node_access",
        "Device",
        "ascend",
        _access,
        "Each node really opens.",
        needs=("ascend.nodes",),
        facts=("ascend.node_access", "host.gids"),
    ),
    Check(
        "ascend.smi",
        "Device",
        "ascend",
        _smi,
        "npu-smi answers.",
        level="import",
        needs=("ascend.node_access",),
        facts=("ascend.smi.chips", "ascend.smi.error"),
    ),
    Check(
        "ascend.health",
        "Device",
        "ascend",
        _health,
        "No card reports an alarm.",
        level="import",
        needs=("ascend.smi",),
        facts=("ascend.health",),
    ),
    Check(
        "ascend.soc",
        "Device",
        "ascend",
        plain("ascend.soc", "SoC {value}"),
        "The SoC name as the runtime spells it.",
        level="import",
        needs=("ascend.smi",),
        facts=("ascend.soc",),
    ),
    Check(
        "ascend.driver.version",
        "Driver",
        "ascend",
        _driver,
        "The driver's version.",
        facts=("ascend.driver.version", "ascend.smi.driver"),
    ),
    Check(
        "ascend.firmware.version",
        "Driver",
        "ascend",
        _firmware,
        "The firmware's version.",
        facts=("ascend.firmware.version", "ascend.smi.firmware"),
    ),
    Check(
        "ascend.driver.pair",
        "Driver",
        "ascend",
        _pair,
        "Driver and firmware accept each other.",
        facts=("ascend.driver.accepts", "ascend.firmware.accepts", "ascend.smi.compatibility"),
    ),
    Check(
        "ascend.driver.libs",
        "Driver",
        "ascend",
        _hal,
        "The driver's user libraries are visible, from one tree.",
        facts=("lib.libascend_hal.so", "ascend.driver.hal"),
    ),
    Check(
        "ascend.cann.trees",
        "Toolkit",
        "ascend",
        _trees,
        "CANN trees on this host.",
        facts=("ascend.cann.trees",),
    ),
    Check(
        "ascend.cann.active",
        "Toolkit",
        "ascend",
        _active,
        "The CANN tree that this environment selects.",
        facts=("ascend.cann.active", "ascend.cann.version", "ascend.cann.missing_dirs"),
    ),
    Check(
        "ascend.cann.required_packages",
        "Toolkit",
        "ascend",
        _required,
        "CANN's packages meet the ranges in each other's version files.",
        needs=("ascend.cann.active",),
        facts=("ascend.cann.packages", "ascend.cann.requires"),
    ),
    Check(
        "ascend.cann.soc_ini",
        "Toolkit",
        "ascend",
        _ini,
        "The toolkit knows the host's SoC.",
        needs=("ascend.cann.active",),
        facts=("ascend.cann.soc_ini", "ascend.soc"),
    ),
    Check(
        "ascend.ops.package",
        "Toolkit",
        "ascend",
        _ops,
        "The operator package of the host's chip is installed.",
        needs=("ascend.cann.active",),
        facts=("ascend.ops.chips", "ascend.ops.version"),
    ),
    Check(
        "ascend.atb.tree",
        "NNAL",
        "ascend",
        _atb_tree,
        "NNAL is selected, from one tree.",
        needs=("ascend.cann.active",),
        facts=("ascend.atb.home", "ascend.atb.trees", "lib.libatb.so", "lib.libmki.so"),
    ),
    Check(
        "ascend.atb.version",
        "NNAL",
        "ascend",
        plain("ascend.atb.version", "version {value}"),
        "NNAL is as new as the toolkit.",
        needs=("ascend.atb.tree",),
        facts=("ascend.atb.version",),
    ),
    Check(
        "ascend.atb.abi",
        "NNAL",
        "ascend",
        plain("ascend.atb.abi", "C++ ABI {value}"),
        "NNAL's libraries are of torch's C++ ABI.",
        needs=("ascend.atb.tree",),
        facts=("ascend.atb.abi", "torch.abi"),
    ),
    Check(
        "ascend.bisheng",
        "Compilers",
        "ascend",
        plain("ascend.bisheng", "bisheng at {value}"),
        "The compilers that triton-ascend calls.",
        facts=("ascend.bisheng", "ascend.bishengir"),
    ),
    Check(
        "ascend.cmake",
        "Compilers",
        "ascend",
        lambda view: None,
        "Ascend C's CMake files, for building.",
        needs=("ascend.cann.active",),
        facts=("ascend.cann.cmake_dir",),
    ),
    Check(
        "lib.resolve.libascendcl.so",
        "Libraries",
        "ascend",
        _library("libascendcl.so"),
        "The runtime library resolves.",
        facts=("lib.libascendcl.so",),
    ),
    Check(
        "lib.resolve.libhccl.so",
        "Libraries",
        "ascend",
        _library("libhccl.so"),
        "The collective library resolves.",
        facts=("lib.libhccl.so",),
    ),
    Check(
        "lib.resolve.ascend_transport.so",
        "Libraries",
        "ascend",
        lambda view: None,
        "The transfer engine's Ascend library resolves.",
        facts=("mooncake.transport",),
    ),
    Check(
        "lib.stub_hal",
        "Libraries",
        "ascend",
        lambda view: None,
        "No stub stands before the driver's own library.",
        facts=("lib.libascend_hal.so",),
    ),
)
