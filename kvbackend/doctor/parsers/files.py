"""Version and install files of CANN, NNAL, drivers, CUDA and the kernel."""

from __future__ import annotations

import json
import re
from typing import Any

from kvbackend.compat import versions


def key_values(text: str, separator: str = "=") -> dict[str, str]:
    """`key=value` lines with exact keys; the first of a repeated key wins; comments and other lines are skipped."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, sep, value = line.partition(separator)
        key = key.strip()
        if sep and key and not key.startswith("#"):
            found.setdefault(key, value.strip().strip('"'))
    return found


def version_info(text: str) -> dict[str, Any] | None:
    """A `version.info` of any package: version, release, and what the package requires of others."""
    pairs = key_values(text)
    version = pairs.get("Version")
    if version is None or versions.parse(version) is None:
        return None
    requires = {}
    for key, bounds in pairs.items():
        match = re.fullmatch(r"required_package_(.+)_version", key)
        if match and bounds:
            requires[package_name(match.group(1))] = bounds
    release = version if numbering_is_public(version) else pairs.get("version_dir", "")
    return {
        "version": version,
        "release": release if versions.parse(release) else "",
        "requires": requires,
        "firmware": ranges(pairs.get("compatible_version_fw", "")),
        "driver": ranges(pairs.get("compatible_version_drv", "")),
        "inner": pairs.get("Innerversion", ""),
    }


def numbering_is_public(version: str) -> bool:
    """From 8.5 on a package's `Version` is the release; before, an internal number of four parts."""
    parsed = versions.parse(version)
    return parsed is not None and parsed.release >= (8, 5, 0) and len(parsed.numbers) <= 3


def package_name(name: str) -> str:
    """A CANN package's name, which files write with `_` or `-`."""
    return name.replace("-", "_").lower()


def install_info(text: str) -> dict[str, Any] | None:
    """An `ascend_*_install.info`: release, inner version, path, and the inner versions it is compatible with."""
    pairs = key_values(text)
    version = pairs.get("version", "")
    if versions.parse(version) is None:
        return None
    return {
        "package": pairs.get("package_name", ""),
        "version": version,
        "inner": pairs.get("innerversion", ""),
        "path": pairs.get("path", ""),
        "arch": pairs.get("arch", ""),
        "compatible": ranges(pairs.get("compatible_version", "")),
    }


def ranges(text: str) -> list[tuple[str, str]]:
    """`[A,B],[C]` as pairs of ends; a single end is both; a trailing dot falls away."""
    found = []
    for inside in re.findall(r"\[([^\[\]]*)\]", text[:4096]):
        ends = [e.strip().rstrip(".") for e in inside.split(",")]
        if ends and all(ends) and len(ends) <= 2:
            found.append((ends[0], ends[-1]))
    return found


def inner_release(text: str) -> str:
    """The `V100R001C22` part of an inner version."""
    match = re.match(r"V\d+R\d+C\d+", text)
    return match.group(0) if match else ""


def inner_compatible(inner: str, allowed: list[tuple[str, str]]) -> bool:
    """Whether an inner version lies in one of the ranges, compared by its V..R..C part."""
    own = inner_release(inner)
    ends = [(inner_release(a), inner_release(b)) for a, b in allowed]
    return bool(own) and any(a and b and len(a) == len(own) and a <= own <= b for a, b in ends)


def version_cfg(text: str) -> dict[str, dict[str, list[str]]]:
    """Old `version.cfg`: package -> {running, upgrade, installed} -> releases."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        match = re.match(r"(\w+)_(running|upgrade|installed)_version=(.*)", line.strip())
        if match:
            package, which, rest = match.groups()
            found.setdefault(package, {})[which] = [r for _, r in re.findall(r"\[([^:\]]*):([^\]]*)\]", rest)]
    return found


def atb_version(text: str) -> str:
    """NNAL's `version.info`, whose keys are indented and use ` : `."""
    version = key_values(text, " : ").get("Ascend-cann-atb", "")
    return version if versions.parse(version) else ""


def nvidia_proc_version(text: str) -> str:
    """The kernel module's version in `/proc/driver/nvidia/version`."""
    match = re.search(r"NVRM version:.*?(?:Kernel Module|Open Kernel Module for \w+)\s+(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else ""


def cuda_version_json(text: str) -> str:
    """The toolkit release in `version.json`."""
    try:
        document = json.loads(text)
        version = document["cuda"]["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return version if isinstance(version, str) and versions.parse(version) else ""


def host_config_gcc(text: str) -> int:
    """The newest gcc major that a toolkit's `host_config.h` accepts; 0 when it does not say."""
    match = re.search(r"#\s*if\s+__GNUC__\s*>\s*(\d{1,3})", text)
    return int(match.group(1)) if match else 0


def os_release(text: str) -> str:
    """The distribution's own name for itself."""
    pairs = key_values(text)
    return pairs.get("PRETTY_NAME") or " ".join(filter(None, (pairs.get("NAME"), pairs.get("VERSION_ID"))))


def python_assignment(text: str, name: str) -> str | None:
    """The literal of `name = '...'` (or None) in a module's text; `None` when there is no such line."""
    match = re.search(rf"^{re.escape(name)}\s*(?::[^=\n]+)?=\s*(?:'([^']*)'|\"([^\"]*)\"|(None))", text, re.M)
    if not match:
        return None
    return "" if match.group(3) else match.group(1) or match.group(2) or ""


def status_field(text: str, name: str) -> str:
    """A field of `/proc/self/status`."""
    match = re.search(rf"^{re.escape(name)}:\s*(.*)$", text, re.M)
    return match.group(1).strip() if match else ""


def meminfo_bytes(text: str) -> int:
    """The total memory in `/proc/meminfo`, 0 when it does not say."""
    match = re.search(r"^MemTotal:\s+(\d{1,15}) kB", text, re.M)
    return int(match.group(1)) * 1024 if match else 0
