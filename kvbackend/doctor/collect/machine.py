"""Facts of the machine itself: system, libraries, user, limits, PCI devices."""

from __future__ import annotations

import os
import platform
import re

from kvbackend.doctor import elf, facts, loader
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host
from kvbackend.doctor.parsers import files

ASCEND_CHIPS = {"d100": "310", "d500": "310P", "d801": "910A", "d802": "A2", "d803": "A3", "d806": "950"}


def system(host: Host) -> Facts:
    """Operating system, kernel, architecture, glibc."""
    found: Facts = {"host.os": facts.maybe(files.os_release(host.text("/etc/os-release")), "/etc/os-release")}
    if host.live:
        found["host.kernel"] = facts.maybe(platform.release(), "uname")
        found["host.arch"] = facts.maybe(platform.machine(), "uname")
    else:
        found["host.kernel"] = facts.absent("an image has no kernel")
        libraries = (loader.read(host, p) for p in loader.find(host, "libc.so.6"))
        found["host.arch"] = facts.maybe(next((lib.machine for lib in libraries if lib), ""), "libc.so.6")
    found["host.glibc"] = _glibc(host)
    return found


def _glibc(host: Host) -> facts.Fact:
    if host.live:
        try:
            name = os.confstr("CS_GNU_LIBC_VERSION") or ""
            return facts.maybe(name.split()[-1] if name else "", "confstr")
        except (ValueError, OSError):
            return facts.absent("confstr")
    for path in loader.find(host, "libc.so.6"):
        library = loader.read(host, path)
        if library:
            return facts.maybe(library.newest("GLIBC_2"), path)
    return facts.absent("libc.so.6")


def libstdcxx(host: Host) -> Facts:
    """The newest GLIBCXX of the libstdc++ that the Python process resolves; conda's own copy goes first."""
    prefix = host.environ.get("CONDA_PREFIX", "")
    candidates = [prefix + "/lib/libstdc++.so.6"] if prefix.startswith("/") else []
    for path in [p for p in candidates if host.exists(p)] + loader.find(host, "libstdc++.so.6"):
        version = elf.newest(host.map(path), "GLIBCXX_3.4")
        if version:
            return {"host.libstdcxx": facts.value(version, path)}
    return {"host.libstdcxx": facts.absent("libstdc++.so.6")}


def compiler(host: Host) -> Facts:
    """The C++ compiler on PATH and its major release, read from names rather than run."""
    for program in ("c++", "g++", "clang++"):
        path = host.which(program)
        if path:
            real = host.real(path)
            match = re.search(r"-(\d{1,2})$", real)
            triples = ["/usr/lib/gcc/" + t for t in host.list("/usr/lib/gcc")]
            majors = [int(n) for t in triples for n in host.list(t) if n.isdigit()]
            major = int(match.group(1)) if match else max(majors, default=0)
            return {"host.cxx": facts.value(path, "PATH"), "host.cxx_major": facts.maybe(major or None, real)}
    return {"host.cxx": facts.absent("PATH"), "host.cxx_major": facts.absent("PATH")}


def container(host: Host) -> Facts:
    """Whether this is a container, and by which sign."""
    signs = [("docker", "/.dockerenv"), ("podman", "/run/.containerenv")]
    for name, path in signs:
        if host.exists(path):
            return {"host.container": facts.value(name, path)}
    for variable in ("KUBERNETES_SERVICE_HOST", "ASCEND_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if variable in host.environ:
            return {"host.container": facts.value("container", variable)}
    groups = host.text("/proc/1/cgroup")
    match = re.search(r"docker|kubepods|containerd|libpod|lxc", groups)
    return {"host.container": facts.maybe(match.group(0) if match else "", "/proc/1/cgroup")}


def user(host: Host) -> Facts:
    """Ids, groups and capabilities of this process, and whether its uid has a passwd entry."""
    status = host.text("/proc/self/status")
    ids, groups = files.status_field(status, "Uid").split(), files.status_field(status, "Groups").split()
    gid = files.status_field(status, "Gid").split()
    found = {
        "host.uid": facts.maybe(int(ids[1]) if len(ids) > 1 and ids[1].isdigit() else None, "/proc/self/status"),
        "host.gids": facts.maybe([int(g) for g in groups + gid[1:2] if g.isdigit()], "/proc/self/status"),
        "host.caps": facts.maybe(files.status_field(status, "CapEff"), "/proc/self/status"),
    }
    uid = found["host.uid"].get("value")
    if uid is None:
        found["host.passwd"] = facts.absent("/etc/passwd")
    else:
        found["host.passwd"] = facts.value(_has_passwd(host, uid), "passwd database")
    return found


def _has_passwd(host: Host, uid: int) -> bool:
    if host.live:
        import pwd

        try:
            pwd.getpwuid(uid)
            return True
        except KeyError:
            return False
    lines = (line.split(":") for line in host.text("/etc/passwd").splitlines())
    return any(len(cells) > 2 and cells[2] == str(uid) for cells in lines)


def resources(host: Host) -> Facts:
    """Memory, shared memory, processors and open-file limits."""
    found = {"host.memory": facts.maybe(files.meminfo_bytes(host.text("/proc/meminfo")) or None, "/proc/meminfo")}
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = host.text(path).strip()
        if text.isdigit() and int(text) < 1 << 60:
            found["host.cgroup_memory"] = facts.value(int(text), path)
    if host.live:
        import resource

        found["host.cpus"] = facts.maybe(len(os.sched_getaffinity(0)), "sched_getaffinity")
        found["host.nofile"] = facts.value(resource.getrlimit(resource.RLIMIT_NOFILE)[0], "getrlimit")
        try:
            space = os.statvfs("/dev/shm")
            found["host.shm"] = facts.value(space.f_frsize * space.f_blocks, "/dev/shm")
        except OSError as error:
            found["host.shm"] = facts.failed("unreadable", "/dev/shm", str(error))
    return found


def pci(host: Host) -> Facts:
    """Accelerators on the PCI bus: the best probe of the chip, as it needs no vendor software."""
    ascend: list[dict[str, str]] = []
    nvidia: list[dict[str, str]] = []
    folder = "/sys/bus/pci/devices"
    for bus in host.list(folder):
        vendor = host.text(f"{folder}/{bus}/vendor").strip().lower()
        if vendor not in ("0x19e5", "0x10de"):
            continue
        device = host.text(f"{folder}/{bus}/device").strip().lower().replace("0x", "")
        if vendor == "0x19e5" and device in ASCEND_CHIPS:
            ascend.append({"bus": bus, "device": device, "family": ASCEND_CHIPS[device]})
        elif vendor == "0x10de" and host.text(f"{folder}/{bus}/class").strip().lower().startswith("0x03"):
            nvidia.append({"bus": bus, "device": device})
    return {"ascend.pci": facts.maybe(ascend, folder), "cuda.pci": facts.maybe(nvidia, folder)}
