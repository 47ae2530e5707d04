"""Where the dynamic loader would find a library: LD_LIBRARY_PATH, the loader's cache, the default folders."""

from __future__ import annotations

import struct

from kvbackend.doctor import elf
from kvbackend.doctor.host import Host

_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_DEFAULTS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)


def parse_cache(data: bytes) -> dict[str, list[str]]:
    """The loader's cache: soname -> paths, in its order; empty for anything that is not one."""
    start = data.find(_CACHE_MAGIC)
    found: dict[str, list[str]] = {}
    if start < 0:
        return found
    try:
        (count,) = struct.unpack_from("<I", data, start + 20)
        for i in range(min(count, 100_000)):
            _, key, target = struct.unpack_from("<iII", data, start + 48 + 24 * i)
            names = []
            for offset in (start + key, start + target):
                end = data.index(b"\0", offset)
                names.append(data[offset:end].decode("utf-8", "replace"))
            found.setdefault(names[0], []).append(names[1])
    except (struct.error, ValueError):
        return found
    return found


def cache(host: Host) -> dict[str, list[str]]:
    """The parsed cache of a host."""
    return host.memo("ld.so.cache", lambda: parse_cache(host.read("/etc/ld.so.cache", 16 * 1024 * 1024).data))


def find(host: Host, soname: str, runpath: tuple[str, ...] = (), origin: str = "") -> list[str]:
    """Every place of a library in the loader's order, each real file once."""
    folders = host.paths("LD_LIBRARY_PATH") + [
        p.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for p in runpath
    ]
    candidates = [f.rstrip("/") + "/" + soname for f in folders] + cache(host).get(soname, [])
    candidates += [f + "/" + soname for f in _DEFAULTS]
    seen, found = set(), []
    for path in candidates:
        real = host.real(path)
        if real not in seen and host.exists(path) and not host.is_dir(path):
            seen.add(real)
            found.append(path)
    return found


def read(host: Host, path: str) -> elf.Elf | None:
    """The parsed library at a path, once per host; None when it is no library."""
    return host.memo(("elf", host.real(path)), lambda: elf.parse(host.map(path)))


def unresolved(host: Host, path: str, given: tuple[str, ...] = ()) -> list[str]:
    """Names in DT_NEEDED that resolve nowhere; `given` are folders of libraries that the process has loaded before."""
    library = read(host, path)
    if library is None:
        return []
    origin = host.real(path).rpartition("/")[0]
    loose = [n for n in library.needed if not n.startswith(("ld-linux", "linux-vdso"))]
    return [n for n in loose if not find(host, n, library.runpath + given, origin)]
