"""Builds what is compiled: one library per csrc/<device> folder that this machine can compile, the wheel that carries
them, and the source archive.

The libraries use libtorch's stable ABI only and nothing of Python's, so one binary serves torch 2.10 and later and
every Python; the small module kvbackend._build is of one Python, and so is a wheel that carries it. Each
csrc/cpu/<op>.cpp is compiled once per instruction set (csrc/cpu/kernel.h). A library that cannot be built is left out
with a message: kvbackend then runs without its kernels and says so.

csrc/cuda is built where nvcc and a CUDA build of torch are; `python setup.py build_cuda` compiles it without linking.
csrc/npu is not among them: torch_npu has no stable ABI. `python setup.py build_npu` compiles it against the torch_npu
that is installed, for this source tree; no wheel carries it.

CXX names the compiler; where that compiles for another machine, KVBACKEND_BUILD_TORCH names the folder of the torch of
that machine. KVBACKEND_BUILD_ISA=native leaves AVX-512 out where this machine cannot run it: half of the time. With
SOURCE_DATE_EPOCH set, two builds give the same bytes: all paths here are relative to the source tree, in which
setuptools runs, since the compiler writes them into its output as spelled.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent.resolve()
SOURCES = Path("csrc")
COMPILER = os.environ.get("CXX", "c++")
TORCH_TARGET = "0x020A000000000000"  # 2.10.0, as TORCH_ABI_VERSION spells it

COMMON_FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-DNDEBUG", "-fopenmp-simd",
    "-fno-math-errno", "-fno-trapping-math", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
]  # fmt: skip
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
FOR_BF16 = re.compile("^KVBACKEND_(REGISTER|PART)_BF16", re.MULTILINE)  # in the files that are compiled for it
BF16 = [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-mgfni", "-mamx-tile", "-mamx-bf16"]
# For tests only (ci/emulated.sh): "tiles" puts AMX's tiles into memory, "avx512" does all of AVX-512 without it.
EMULATED = os.environ.get("KVBACKEND_EMULATE", "")
if EMULATED not in ("", "tiles", "avx512"):
    raise SystemExit(f"KVBACKEND_EMULATE is {EMULATED!r}; it is tiles, avx512 or unset: unset it")
EMULATES = []  # what isa.cpp is to know
if EMULATED:
    EMULATES.append("-DKVBACKEND_EMULATED_TILES")
if EMULATED == "avx512":
    EMULATES.append("-DKVBACKEND_EMULATED_AVX512")
    AVX512 = [*AVX2, "-O1", "-Wno-psabi", "-include", "csrc/cpu/emulated_avx512.h"]
    BF16 = [*AVX512, "-DKVBACKEND_EMULATED_BF16"]
BF16 += EMULATES
CCACHE = {"CCACHE_SLOPPINESS": "pch_defines,time_macros"}  # or it keeps nothing that is made with precompiled headers
MODULE = Path("kvbackend") / f"_build{sysconfig.get_config_var('EXT_SUFFIX')}"
CUDA_TARGETS = ("80", "90", "100", "120")  # of csrc/cuda, as far as nvcc knows them


def compiler_says(argument: str) -> str:
    try:
        return subprocess.run([COMPILER, argument], capture_output=True, text=True).stdout
    except OSError:  # there is none: `run` will say so
        return ""


def machine() -> str:
    """What the compiler compiles for."""
    return compiler_says("-dumpmachine").partition("-")[0] or platform.machine()


def variants() -> dict[str, list[str]]:
    """The instruction sets that csrc/cpu is compiled for, with the flags of each.

    plain is first: of an inline function that is there several times the linker keeps the first, which every CPU runs.
    """
    wanted = os.environ.get("KVBACKEND_BUILD_ISA", "")
    if wanted not in ("", "native"):
        raise SystemExit(f"KVBACKEND_BUILD_ISA is {wanted!r}; it is native, or unset to build for every CPU: unset it")
    found: dict[str, list[str]] = {"plain": []}
    if machine() == "x86_64":
        from torch.backends.cpu import get_cpu_capability

        found["avx2"] = AVX2
        if wanted != "native" or EMULATED or get_cpu_capability() == "AVX512":
            found |= {"avx512": AVX512, "avx512_bf16": BF16}
    return found


class NotBuiltError(Exception):
    """Why a library is left out."""


class NotWantedError(NotBuiltError):
    """It is for another torch than this one: nothing to tell."""


def cpu_library(build: Path, target: Path) -> None:
    """Compile csrc/cpu into one library."""
    import torch

    stamps, tables = from_python()
    once = (SOURCES / "cpu" / "isa.cpp", SOURCES / "common" / "direct.cpp")
    sources = sorted({*(SOURCES / "cpu").glob("*.cpp")} - {*once}, key=lambda path: (path.stem in stamps, path))
    write_stamp(build, (stamps[path.stem] for path in sources if path.stem in stamps))
    for name, table in tables.items():
        write_if_changed(build / name, table)
    installed = Path(os.environ.get("KVBACKEND_BUILD_TORCH") or Path(torch.__file__).parent)
    version = re.search(r"__version__ = '(.+)'", (installed / "version.py").read_text())[1]
    # another torch's headers are another command, so all is made anew
    headers = linked(build / f"torch-{version}", installed / "include")
    includes = [f"-I{path}" for path in (build, headers)]
    common = [*COMMON_FLAGS, *includes]
    held = variants()
    holds = [f"-DKVBACKEND_{variant.upper()}" for variant in ("avx2", "avx512") if variant in held]
    jobs = [(path, build / f"{path.stem}.o", ["-DKVBACKEND_ISA=plain", *holds, *EMULATES]) for path in once]
    own = {variant: [f"-DKVBACKEND_ISA={variant}", *flags] for variant, flags in held.items()}
    own["plain"] += ["-DKVBACKEND_REGISTERS", *holds]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        include = list(pool.map(lambda variant: precompiled(build / variant, common, own[variant]), held))
    for variant, precompiled_header in zip(held, include, strict=True):
        for path in sources:  # what ops share first: it takes longest
            if variant == "avx512_bf16" and not FOR_BF16.search(path.read_text()):
                continue
            jobs.append((path, build / f"{path.stem}.{variant}.o", [*own[variant], *precompiled_header]))
    libraries = [f"-L{installed / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    compile_and_link(common, jobs, libraries, target)


def precompiled(build: Path, common: list[str], flags: list[str]) -> list[str]:
    """The flags with which GCC takes csrc/cpu/kernel.h, torch's headers in it, from a file that it has made of it.

    Read anew for each object, that would be a fifth of the build. No flags where such a file cannot be made; where one
    cannot be used, GCC reads the empty header beside it and goes on.
    """
    if "Free Software Foundation" not in compiler_says("--version"):
        return []  # other compilers have other rules
    if "-include" in flags:
        return []  # what is emulated comes first
    header, built, shared = build / "kernel.h", build / "kernel.h.gch", ["-fpch-preprocess"]  # which ccache asks for
    build.mkdir(exist_ok=True)
    write_if_changed(header, "")
    try:  # -w: #pragma once in what is compiled itself
        compile_one(COMPILER, common, SOURCES / "cpu" / "kernel.h", built, [*flags, *shared, "-w", "-x", "c++-header"])
    except NotBuiltError:
        return []
    return [*shared, "-include", str(header)]


def python_module(build: Path, target: Path, libraries: Iterable[str]) -> None:
    """Compile csrc/module.cpp for the Python that runs this."""
    import pybind11
    import torch

    if machine() != platform.machine():
        raise NotWantedError(f"the module is for this Python, which runs on {platform.machine()}, not {machine()}")
    build.mkdir(parents=True, exist_ok=True)
    found = {"python": sysconfig.get_path("include"), "pybind11": pybind11.get_include()}
    found["torch"] = str(Path(torch.__file__).parent / "include")  # DLPack's header
    includes = [f"-I{linked(build / name, Path(path))}" for name, path in found.items()]
    facts = {"BUILT_WITH_TORCH": torch.__version__, "BUILT_LIBRARIES": " ".join(libraries)}
    defines = [f'-DKVBACKEND_{name}="{value}"' for name, value in facts.items()]
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", *includes, *defines]
    target.parent.mkdir(parents=True, exist_ok=True)
    run([COMPILER, "-shared", *flags, str(SOURCES / "module.cpp"), "-o", str(target)])


def linked(link: Path, folder: Path) -> Path:
    """A link in build/ to headers elsewhere: commands then name no folder of this machine."""
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    return link


def npu_library(build: Path, torch_npu: Path, target: Path) -> None:
    """Compile csrc/npu against the headers of an installed torch_npu; CANN is not needed for that."""
    import torch

    stamps, _ = from_python()
    sources = [*sorted((SOURCES / "npu").glob("*.cpp")), SOURCES / "common" / "stamp.cpp"]
    write_stamp(build, (stamps[path.stem] for path in sources if path.stem in stamps))
    own = torch_npu / "include"
    parts = ("third_party/acl/inc", "third_party/hccl/inc", "third_party/op-plugin")
    includes = [f"-isystem{path}" for path in (*torch_includes(), own, *(own / part for part in parts))]
    major, minor = torch.__version__.split(".")[:2]
    common = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", f"-I{build}"]
    common += [f"-DCURRENT_VERSION=V{major}R{minor}", *includes]  # torch_npu's headers ask for their torch
    libraries = [f"-L{path}" for path in (torch_npu / "lib", *torch_library_paths())]
    libraries += ["-ltorch_npu", "-ltorch", "-ltorch_cpu", "-lc10"]
    compile_and_link(common, [(path, build / f"{path.stem}.o", []) for path in sources], libraries, target)


def cuda_library(build: Path, target: Path) -> None:
    """Compile csrc/cuda and link it, where torch is a CUDA build."""
    import torch

    if torch.version.cuda is None:
        raise NotWantedError(f"torch {torch.__version__} is built without CUDA; csrc/cuda links against libtorch_cuda")
    objects = cuda_objects(build)
    libraries = [f"-L{path}" for path in torch_library_paths("cuda")]
    libraries += ["-ltorch_cuda", "-ltorch_cpu", "-ltorch", "-lc10_cuda", "-lc10", "-lcudart"]
    link(objects, libraries, target)


def cuda_objects(build: Path, *flags: str) -> list[Path]:
    """Compile csrc/cuda for the generations that this nvcc knows: machine code, and PTX for later ones."""
    stamps, tables = from_python()
    sources = sorted((SOURCES / "cuda").glob("*.cu"))
    write_stamp(build, (stamps[path.stem] for path in sources))
    write_if_changed(build / "records.inc", tables["records.inc"])
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if not nvcc:
        raise NotBuiltError("there is no nvcc; csrc/cuda is compiled by it: install the CUDA toolkit or set NVCC")
    try:
        known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    except OSError as error:
        raise NotBuiltError(f"{nvcc} cannot be started ({error}): install the CUDA toolkit or set NVCC") from error
    targets = [number for number in CUDA_TARGETS if f"sm_{number}" in known]
    if not targets:
        raise NotBuiltError(
            f"{nvcc} knows {' '.join(known) or 'no GPU'}; csrc/cuda is for sm_{', sm_'.join(CUDA_TARGETS)}: install a "
            f"newer CUDA toolkit"
        )
    common = [
        "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "-DUSE_CUDA", "-DKVBACKEND_ISA=cuda",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", f"-I{build}", *(f"-I{path}" for path in torch_includes()), *flags,
        *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in targets),
        f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}",
    ]  # fmt: skip
    jobs = [(path, build / f"{path.stem}.o") for path in (*sources, SOURCES / "common" / "stamp.cpp")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: compile_one(nvcc, common, *job, []), jobs))
    return [output for _, output in jobs]


def write_stamp(build: Path, schemas: Iterable[str]) -> None:
    build.mkdir(parents=True, exist_ok=True)
    stamp = "\\n".join(schema.replace('"', '\\"') for schema in schemas)
    write_if_changed(build / "stamp.h", f'#define KVBACKEND_STAMP "{stamp}"\n')


def compile_and_link(
    common: list[str], jobs: list[tuple[Path, Path, list[str]]], libraries: list[str], target: Path
) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: compile_one(COMPILER, common, *job), jobs))
    link([output for _, output, _ in jobs], libraries, target)


def link(objects: list[Path], libraries: list[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    linked = target.with_suffix(".tmp")
    run([COMPILER, "-shared", "-Wl,-soname," + target.name, *map(str, objects), *libraries, "-o", str(linked)])
    linked.replace(target)  # whoever has the old library mapped keeps it


def compile_one(compiler: str, common: list[str], source: Path, output: Path, flags: list[str]) -> None:
    """Compile one file, unless its object was made by the same command and is newer than all it was made from."""
    made_from, made_by = output.with_suffix(".d"), output.with_suffix(".cmd")
    command = [compiler, *common, *flags, "-MMD", "-MF", str(made_from), "-c", str(source), "-o", str(output)]
    if output.exists() and made_by.exists() and made_by.read_text() == " ".join(command):
        # the compiler wrote "object: source header header ..."
        inputs = [Path(name) for name in made_from.read_text().replace("\\\n", " ").partition(":")[2].split()]
        # but not what a precompiled one was made from, nor that one
        included = [Path(f"{name}.gch") for flag, name in pairwise(flags) if flag == "-include"]
        inputs += [path for path in included if path.exists()]
        if output.stat().st_mtime > max(path.stat().st_mtime if path.exists() else float("inf") for path in inputs):
            return
    made_by.unlink(missing_ok=True)
    run(command)
    made_by.write_text(" ".join(command))


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=CCACHE | os.environ)
    except OSError as error:
        raise NotBuiltError(f"{command[0]} cannot be started ({error}): install a C++17 compiler or set CXX") from error
    if done.returncode:
        raise NotBuiltError(f"{' '.join(command)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def from_python() -> tuple[dict[str, str], dict[str, str]]:
    """What the kernels are built for: what each op declares, and the tables of formats and of records."""
    sys.path.insert(0, str(ROOT))
    try:
        from kvbackend import codegen
        from kvbackend.ops import registry
    finally:
        sys.path.remove(str(ROOT))
    tables = {"formats.inc": codegen.formats_table(), "records.inc": codegen.records_table()}
    return {name: codegen.stamp(op) for name, op in registry.items()}, tables


def torch_includes() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    return include_paths()


def torch_library_paths(device: str = "cpu") -> list[str]:
    from torch.utils.cpp_extension import library_paths

    return library_paths(device)


LIBRARIES = {"cpu": cpu_library, "cuda": cuda_library}


class BuildLibraries(build_ext):
    """The device libraries, and the module that tells which there are."""

    def run(self) -> None:
        place, built = Path() if self.inplace else Path(self.build_lib), []
        for device, build in LIBRARIES.items():
            target = place / "kvbackend" / "_lib" / f"libkvbackend_{device}.so"
            try:
                import torch

                if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
                    raise NotBuiltError(f"torch is {torch.__version__}; the stable ABI needs 2.10 or newer")
                build(Path("build") / f"{device}-{machine()}", target)
                built.append(device)
            except (NotBuiltError, ImportError) as error:
                target.unlink(missing_ok=True)  # an older one would hide that this one is not built
                if not isinstance(error, NotWantedError):
                    print(f"kvbackend: the {device} kernels are NOT built; others will run.\n{error}", file=sys.stderr)
        try:
            python_module(Path("build") / "module", place / MODULE, built)
        except (NotBuiltError, ImportError) as error:  # it only carries facts
            (place / MODULE).unlink(missing_ok=True)
            if not isinstance(error, NotWantedError):
                print(f"kvbackend: the module kvbackend._build is NOT built.\n{error}", file=sys.stderr)


class Plain(Command):
    """A command without options."""

    user_options = []  # noqa: RUF012  (setuptools reads it of the class)

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...


class BuildCuda(Plain):
    """Compile csrc/cuda without linking it, which a CPU build of torch allows, and show what ptxas says."""

    description = "compile csrc/cuda for every GPU generation, with the resources of each kernel"

    def run(self) -> None:
        build = Path("build") / f"cuda-{machine()}-resources"
        shutil.rmtree(build, ignore_errors=True)  # what is not compiled again says nothing
        try:
            cuda_objects(build, "-Xptxas", "-v")
        except NotBuiltError as error:
            raise SystemExit(f"csrc/cuda does not compile.\n{error}") from error


class BuildNpu(Plain):
    """Compile csrc/npu, or say what is missing."""

    description = "compile csrc/npu against the installed torch_npu, for this source tree"

    def run(self) -> None:
        found = importlib.util.find_spec("torch_npu")  # not imported: that needs CANN
        if found is None or found.origin is None:
            raise SystemExit(
                "torch_npu is not installed; csrc/npu is compiled against its headers: install the torch-npu of your "
                "torch (docs/ascend.md)"
            )
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch must not import it either
        version = metadata.version("torch-npu")
        target = Path("kvbackend") / "_lib" / f"torch_npu-{version}" / "libkvbackend_npu.so"
        try:
            npu_library(Path("build") / f"torch_npu-{version}", Path(found.origin).parent, target)
        except NotBuiltError as error:
            raise SystemExit(f"csrc/npu does not compile against torch_npu {version}.\n{error}") from error
        print(f"{target}: for torch_npu {version}")


class Binary(Distribution):
    """Holds compiled code, though none that setuptools compiles: its wheel is of one platform."""

    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    """One for a release of Python, or without the module for every Python of a platform."""

    def run(self) -> None:
        # what an earlier build left there would slip in
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform_tag = super().get_tag()
        module = Path(self.get_finalized_command("build").build_lib) / MODULE
        return (python, abi, platform_tag) if module.exists() else ("py3", "none", platform_tag)


class SourceArchive(sdist):
    """Its bytes depend on what its files hold, and on SOURCE_DATE_EPOCH, alone."""

    def make_archive(self, base_name: str, format: str, *_: object, base_dir: str, **__: object) -> str:
        date = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime, member.uid, member.gid, member.uname, member.gname = date, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        name = f"{base_name}.tar.gz"
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", mtime=date, fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for path in sorted(Path(base_dir).rglob("*")):
                archive.add(path, recursive=False, filter=without_origin)
        return name


setup(
    distclass=Binary,
    cmdclass={
        "build_ext": BuildLibraries,
        "build_cuda": BuildCuda,
        "build_npu": BuildNpu,
        "bdist_wheel": Wheel,
        "sdist": SourceArchive,
    },
)
