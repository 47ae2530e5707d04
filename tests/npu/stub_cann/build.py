"""Build libraries that take the place of CANN's for tests on a machine without CANN: x86-64 Linux, gcc.

    python -m tests.npu.stub_cann.build OUT        # OUT becomes LD_LIBRARY_PATH of the tests

Every name that torch_npu's libraries want and nobody has becomes a function that returns 0; the runtime (runtime.cpp)
and the operator library (opapi.cpp) are written by hand. Names come from the ELF tables of the installed wheel: nothing
of CANN is used. Never package these libraries, and never put them where a real CANN is: the build refuses there.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from kvbackend.backends.npu import vendor_ops

HERE = Path(__file__).parent
SYSTEM = re.compile(r"(lib(c|m|pthread|dl|rt|gcc_s|stdc\+\+)\.so(\.\d+)?|ld-linux.*)")
NOT_OURS = re.compile(r"_?Py|__gmon|_ITM_|__cxa_|_ZTH")
MAIN = "libascendcl.so"
CANN_HOMES = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit", "/usr/local/Ascend/nnal")
CXX = ("g++", "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra")


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def real_cann() -> str:
    """Where a real CANN is, or an empty text."""
    named = [os.environ.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")]
    found = [place for place in (*named, *CANN_HOMES) if place and Path(place).exists()]
    return found[0] if found else ctypes.util.find_library("ascendcl") or ""


def package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed here; the stubs are made for its wheel: install it")
    return Path(spec.origin).parent


def needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.*?)\]", run("readelf", "-d", library)))


def symbols(library: Path) -> tuple[set[str], set[str]]:
    """(wanted, defined) names of a library's dynamic table."""
    wanted, defined = set(), set()
    for line in run("readelf", "-W", "--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            (wanted if fields[6] == "UND" else defined).add(fields[7].split("@")[0])
    return wanted, defined


def system_libraries() -> list[Path]:
    sonames = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "libdl.so.2",
               "librt.so.1", "libpthread.so.0")  # fmt: skip
    places = [Path(run("g++", f"-print-file-name={soname}").strip()) for soname in sonames]
    return [place for place in places if place.is_absolute() and place.exists()]


def assembly(names: list[str]) -> str:
    """Functions that return 0, and zeroed objects where a name is a vtable or type info."""
    lines = ["\t.text"]
    for name in names:
        if name.startswith(("_ZTV", "_ZTI", "_ZTS")):
            lines += [
                f'\t.data\n\t.globl "{name}"\n\t.type "{name}",@object\n\t.align 16\n"{name}":\n\t.zero 256\n\t.text'
            ]
        else:
            lines += [f'\t.globl "{name}"\n\t.type "{name}",@function\n"{name}":']
            lines += ["\txor %eax,%eax\n\txor %edx,%edx\n\tpxor %xmm0,%xmm0\n\tret"]
    return "\n".join([*lines, '\t.section .note.GNU-stack,"",@progbits', ""])


def trampolines(names: list[str]) -> str:
    """For each aclnn op: GetWorkspaceSize saves registers and calls ascend_stub_record, the launch its namesake."""
    registers = "".join(
        f"\tmov %{name},{-48 + 8 * i}(%rbp)\n" for i, name in enumerate(("rdi", "rsi", "rdx", "rcx", "r8", "r9"))
    )
    floats = "".join(f"\tmovsd %xmm{i},{-112 + 8 * i}(%rbp)\n" for i in range(8))
    lines = ["\t.text"]
    for i, name in enumerate(names):
        first = name + "GetWorkspaceSize"
        lines += [
            f"\t.globl {first}\n\t.type {first},@function\n{first}:\n\tpush %rbp\n\tmov %rsp,%rbp\n\tsub $128,%rsp"
        ]
        lines += [registers + floats + f"\tlea .Lname{i}(%rip),%rdi\n\tlea -48(%rbp),%rsi\n\tlea -112(%rbp),%rdx"]
        lines += ["\tlea 16(%rbp),%rcx\n\tcall ascend_stub_record@PLT\n\tleave\n\tret"]
        lines += [f"\t.globl {name}\n\t.type {name},@function\n{name}:\n\tsub $8,%rsp\n\tlea .Lname{i}(%rip),%rdi"]
        lines += ["\tmov %rdx,%rsi"]  # the executor
        lines += ["\tcall ascend_stub_launch@PLT\n\tadd $8,%rsp\n\tret"]
        lines += [f'\t.section .rodata\n.Lname{i}:\t.asciz "{name}"\n\t.text']
    return "\n".join([*lines, '\t.section .note.GNU-stack,"",@progbits', ""])


def share(out: Path, name: str, *parts: object) -> None:
    run("g++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", out / name, *parts)


def build(out: Path) -> None:
    if place := real_cann():
        raise SystemExit(f"a real CANN is at {place}; stubs must not meet it: run the device check instead")
    out.mkdir(parents=True, exist_ok=True)
    torch_npu, torch_lib = package("torch_npu"), package("torch") / "lib"
    ours, torchs = list(torch_npu.rglob("*.so")), list(torch_lib.glob("*.so*"))
    have = {path.name for path in (*ours, *torchs)}
    libraries = {name for path in ours for name in needed(path) if name not in have and not SYSTEM.fullmatch(name)}
    tables = [symbols(path) for path in ours]
    wanted = set().union(*(table[0] for table in tables))
    defined = set().union(
        *(table[1] for table in tables), *(symbols(path)[1] for path in (*torchs, *system_libraries()))
    )
    include = torch_npu / "include"
    headers = [f"-I{include}", f"-I{include}/third_party/acl/inc"]
    run(*CXX, *headers, "-c", HERE / "runtime.cpp", "-o", out / "runtime.o")
    by_hand = {line.split()[-1] for line in run("nm", "--defined-only", "-g", out / "runtime.o").splitlines()}
    rest = sorted(name for name in wanted - defined - by_hand if not NOT_OURS.match(name))
    (out / "rest.s").write_text(assembly(rest))
    share(out, MAIN, out / "rest.s", out / "runtime.o", "-lpthread")
    for name in sorted(libraries - {MAIN}):
        share(out, name, "-Wl,--no-as-needed", "-x", "c", "/dev/null", f"-L{out}", "-lascendcl", "-Wl,-rpath,$ORIGIN")
    names = re.findall(
        rb"(?<![A-Za-z0-9_])aclnn[A-Z][A-Za-z0-9]+(?![A-Za-z0-9_])", (torch_npu / "lib/libtorch_npu.so").read_bytes()
    )
    asked = sorted({name.decode() for name in names if name.endswith(b"GetMaxWorkspaceSize")})  # the answer is 0 bytes
    of_package = {name for op in vendor_ops.ALL if op.of_cann for name in op.aclnn}  # torch_npu does not call these
    own = {name.decode().removesuffix("GetWorkspaceSize") for name in names}
    operators = sorted((own | of_package).difference(asked))
    (out / "operators.s").write_text(trampolines(operators) + assembly(asked))
    run(*CXX, "-fvisibility=hidden", "-c", HERE / "opapi.cpp", "-o", out / "opapi.o")
    share(
        out, "libopapi.so", out / "operators.s", out / "opapi.o", "-lpthread", f"-L{out}", "-lascendcl",
        "-Wl,-rpath,$ORIGIN",
    )  # fmt: skip
    share(
        out, "libnnopbase.so", "-Wl,--no-as-needed", "-x", "c", "/dev/null", f"-L{out}", "-lopapi", "-Wl,-rpath,$ORIGIN"
    )
    print(f"{len(libraries)} libraries, {len(rest)} empty functions, {len(operators)} aclnn operators in {out}")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
