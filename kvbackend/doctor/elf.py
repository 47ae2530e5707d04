"""Read what a shared library needs and offers, without loading it."""

from __future__ import annotations

import mmap
import re
import struct
from typing import Callable, NamedTuple, Union

Data = Union[bytes, mmap.mmap]
_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRTAB, _SYMTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH, _GNU_HASH = 1, 5, 6, 10, 14, 15, 29, 0x6FFFFEF5
_STRINGS_LIMIT = 16 * 1024 * 1024
_SYMBOLS_LIMIT = 500_000


class Elf(NamedTuple):
    """The dynamic part of a 64-bit little-endian library."""

    machine: str
    soname: str
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    strings: bytes  # the dynamic string table: names of symbols and version needs
    undefined: tuple[str, ...]
    defined: frozenset[str]

    def newest(self, family: str) -> str:
        """The highest version of a family (`GLIBCXX_3.4`, `GLIBC_2`) named here, such as 3.4.30; '' when none."""
        return newest(self.strings, family)

    def has(self, symbol: str) -> bool:
        """Whether a symbol of that name occurs."""
        return b"\0" + symbol.encode() + b"\0" in self.strings


def newest(data: Data, family: str) -> str:
    """The highest `FAMILY.n` that occurs in bytes, without the family's word: b"GLIBCXX_3.4.30" -> "3.4.30"."""
    found = re.findall(re.escape(family.encode()) + rb"((?:\.\d{1,3}){1,2})(?=\0|$)", data)
    prefix = family.split("_")[-1]
    numbers = [tuple(int(n) for n in f.decode()[1:].split(".")) for f in found]
    return prefix + "." + ".".join(map(str, max(numbers))) if numbers else ""


def parse(data: Data) -> Elf | None:
    """Parse a library's bytes; None for anything that is not a sound 64-bit little-endian ELF file."""
    try:
        return _parse(data)
    except (struct.error, IndexError, ValueError, OverflowError):
        return None


def _parse(data: Data) -> Elf | None:
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    (machine,) = struct.unpack_from("<H", data, 18)
    (phoff,) = struct.unpack_from("<Q", data, 32)
    phsize, phcount = struct.unpack_from("<HH", data, 54)
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] = (0, 0)
    for i in range(min(phcount, 256)):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, phoff + i * phsize)
        if kind == _LOAD:
            loads.append((address, offset, size))
        elif kind == _DYNAMIC:
            dynamic = (offset, size)
    entries: dict[int, list[int]] = {}
    for i in range(min(dynamic[1] // 16, 4096)):
        tag, number = struct.unpack_from("<qQ", data, dynamic[0] + 16 * i)
        if tag == 0:
            break
        entries.setdefault(tag, []).append(number)

    def place(address: int) -> int:
        for start, offset, size in loads:
            if start <= address < start + size:
                return offset + address - start
        raise ValueError("address outside the file")

    if _STRTAB not in entries:
        return Elf(_MACHINES.get(machine, "?"), "", (), (), b"", (), frozenset())
    size = min(entries.get(_STRSZ, [0])[0], _STRINGS_LIMIT)
    begin = place(entries[_STRTAB][0])
    strings = data[begin : begin + size]

    def name(offset: int) -> str:
        return strings[offset : strings.index(b"\0", offset)].decode("utf-8", "replace")

    undefined, defined = _symbols(data, entries, place, strings)
    runpath = [p for tag in (_RUNPATH, _RPATH) for n in entries.get(tag, []) for p in name(n).split(":") if p]
    soname = name(entries[_SONAME][0]) if _SONAME in entries else ""
    return Elf(
        _MACHINES.get(machine, "?"),
        soname,
        tuple(name(n) for n in entries.get(_NEEDED, [])),
        tuple(runpath),
        strings,
        undefined,
        defined,
    )


def _symbols(
    data: Data, entries: dict[int, list[int]], place: Callable[[int], int], strings: bytes
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of the dynamic symbol table.

    Linkers put it right before the string table. What edits a library afterwards (patchelf, for torch's wheels with
    CUDA) moves that one away; then the hash table tells how many symbols there are.
    """
    if _SYMTAB not in entries:
        return (), frozenset()
    begin, end = place(entries[_SYMTAB][0]), place(entries[_STRTAB][0])
    if not 0 < end - begin <= 24 * _SYMBOLS_LIMIT:
        end = begin + 24 * _hashed(data, place(entries[_GNU_HASH][0])) if _GNU_HASH in entries else begin
    undefined, defined = [], []
    for offset, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", data[begin : begin + (end - begin) // 24 * 24]):
        if not offset or offset >= len(strings):
            continue
        text = strings[offset : strings.find(b"\0", offset)].decode("utf-8", "replace")
        if section:
            defined.append(text)
        elif info >> 4 == 1:  # global; weak ones may stay undefined
            undefined.append(text)
    return tuple(undefined), frozenset(defined)


def _hashed(data: Data, place: int) -> int:
    """The number of symbols: one more than the last in the chain of the last bucket of a GNU hash table."""
    buckets, first, bloom, _ = struct.unpack_from("<4I", data, place)
    table = place + 16 + 8 * bloom
    chains = table + 4 * buckets
    last: int = max(struct.unpack_from(f"<{buckets}I", data, table))
    if last < first:  # no symbol is hashed
        return first
    while not struct.unpack_from("<I", data, chains + 4 * (last - first))[0] & 1:
        last += 1
    return last + 1
