"""Host trees made of plain data: three clean hosts, and changes to them.

A tree is {path: content}; content is text, bytes, DIR, or `-> target` for a link. A change is a dict with the keys
`files` and `env` (None takes away), `tools` (what programs print), `deny` (device node -> error) and `gone` (prefixes
of paths that go away).
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from kvbackend.doctor.collect import collect
from kvbackend.doctor.host import Host
from kvbackend.doctor.process import Output

SAMPLES = Path(__file__).parent / "samples"
DIR = object()
CANN, DRIVER = "/usr/local/Ascend/cann-9.1.0", "/usr/local/Ascend/driver"
ATB = "/usr/local/Ascend/nnal/atb/9.1.0"
SITE = "/usr/local/lib/python3.11/site-packages"
PCI = "/sys/bus/pci/devices/"
TBE = ("attr", "decorator", "psutil", "scipy", "sympy", "cffi", "yaml", "numpy", "google", "cloudpickle", "tornado")


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def elf(needed=(), defined=(), undefined=(), strings=(), machine=62, soname="", runpath="") -> bytes:
    """A minimal shared library: one load segment over the whole file, a dynamic section, symbols, names."""
    table = bytearray(b"\0")

    def name(text: str) -> int:
        table.extend(text.encode() + b"\0")
        return len(table) - len(text) - 1

    tags = [(1, name(n)) for n in needed]
    tags += [(14, name(soname))] if soname else []
    tags += [(29, name(runpath))] if runpath else []
    symbols = [(0, 0, 0)] + [(name(s), 0x12, 1) for s in defined] + [(name(s), 0x12, 0) for s in undefined]
    for text in strings:
        name(text)
    dynamic_at = 64 + 2 * 56
    symbols_at = dynamic_at + 16 * (len(tags) + 4)
    strings_at = symbols_at + 24 * len(symbols)
    tags += [(6, symbols_at), (5, strings_at), (10, len(table)), (0, 0)]
    size = strings_at + len(table)
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, 16 * len(tags), 16 * len(tags), 8)
    body = b"".join(struct.pack("<qQ", *t) for t in tags)
    body += b"".join(struct.pack("<IBBHQQ", n, info, 0, section, 0, 0) for n, info, section in symbols)
    return head + load + dynamic + body + bytes(table)


def dist(name: str, version: str) -> dict:
    return {f"{SITE}/{name.replace('-', '_')}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n"}


def torch_files(version: str, cuda: str | None = None, abi: int = 1) -> dict:
    symbol = "_ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcE" if abi else "_ZN3c105ErrorC1ERKSs"
    return {
        **dist("torch", version),
        f"{SITE}/torch/__init__.py": "",
        f"{SITE}/torch/_C.so": elf(needed=("libc10.so",), runpath="$ORIGIN/lib"),
        f"{SITE}/torch/version.py": f"__version__ = '{version}'\ndebug = False\ncuda = {cuda!r}\nhip = None\n",
        f"{SITE}/torch/lib/libc10.so": elf(defined=(symbol, "_ZN3c103fooEv")),
        f"{SITE}/torch/lib/libtorch_cpu.so": elf(defined=("_ZN5torch3barEv", "aoti_torch_empty")),
    }


OWN = {
    **dist("kvbackend", "0.1.0"),
    f"{SITE}/kvbackend/__init__.py": "",
    f"{SITE}/kvbackend/_lib/libkvbackend_cpu.so": elf(
        needed=("libc10.so", "libc.so.6"),
        defined=("kvbackend_stamp",),
        undefined=("aoti_torch_empty", "_ZN3c103fooEv"),
        strings=("GLIBCXX_3.4.26", "GLIBC_2.28"),
    ),
}
HOST = {
    "/etc/os-release": 'PRETTY_NAME="openEuler 24.03"\n',
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "/proc/self/status": "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0 1000\nCapEff:\t00000000a80425fb\n",
    "/proc/meminfo": "MemTotal:       134217728 kB\n",
    "/usr/lib64/libc.so.6": elf(strings=("GLIBC_2.28", "GLIBC_2.38")),
    "/usr/lib64/libstdc++.so.6": elf(strings=("GLIBCXX_3.4.29", "GLIBCXX_3.4.32")),
}


def pci(bus: str, vendor: str, device: str, kind: str) -> dict:
    return {
        f"{PCI}{bus}/vendor": f"0x{vendor}\n",
        f"{PCI}{bus}/device": f"0x{device}\n",
        f"{PCI}{bus}/class": f"0x{kind}\n",
    }


def answers(*lines: dict) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


TORCH_OK = {"ok": True, "version": "2.10.0+cpu", "abi": 1, "archs": [], "file": f"{SITE}/torch/__init__.py"}
OPS_OK = {
    "ok": True,
    "libraries": {"cpu": {"reason": None, "ops": ["reshape_and_cache"]}},
    "table": [
        {"op": "reshape_and_cache", "backend": "cpu", "device": "cpu", "status": "runs", "reasons": []},
        {
            "op": "paged_attention",
            "backend": "cpu",
            "device": "cpu",
            "status": "refused",
            "reasons": ["q is torch.int8"],
        },
        {"op": "paged_attention", "backend": "npu", "device": "npu", "status": "unproven", "reasons": []},
    ],
}

ASCEND_950 = {
    "files": {
        **HOST,
        **pci("0000:71:00.0", "19e5", "d806", "120000"),
        **OWN,
        **torch_files("2.10.0+cpu"),
        **dist("torch-npu", "2.10.0.post4"),
        f"{SITE}/torch_npu/__init__.py": "",
        f"{SITE}/torch_npu/_C.so": elf(
            needed=("libtorch_npu.so", "libhccl.so", "libascendcl.so"), runpath="$ORIGIN/lib"
        ),
        f"{SITE}/torch_npu/lib/libtorch_npu.so": elf(needed=("libc10.so",), defined=("_ZN7c10_npu3fooEv",)),
        **dist("numpy", "1.26.4"),
        **dist("triton-ascend", "3.2.2"),
        f"{SITE}/triton/backends/ascend/__init__.py": "",
        **{f"{SITE}/{m}/__init__.py": "" for m in (*TBE, "absl", "ml_dtypes")},
        "/etc/ascend_install.info": sample("files/etc_ascend_install.info.950"),
        "/etc/Ascend/ascend_cann_install.info": sample("files/etc_Ascend_ascend_cann_install.info"),
        **{f"/dev/{n}": "" for n in ("davinci0", "davinci_manager", "hisi_hdc")},
        f"{DRIVER}/version.info": sample("files/driver_version.info.950.25.7.rc1.6"),
        "/usr/local/Ascend/firmware/version.info": "Version=9.0.0.105.229\nfirmware_version=1.0\n",
        f"{DRIVER}/lib64/driver/libascend_hal.so": elf(soname="libascend_hal.so"),
        f"{DRIVER}/lib64/libc_sec.so": elf(),
        "/usr/local/dcmi/libdcmi.so": elf(),
        "/usr/local/bin/npu-smi": "#!/bin/sh\n",
        f"{CANN}/runtime/": DIR,
        f"{CANN}/compiler/version.info": sample("files/compiler_version.info.9.1.0"),
        f"{CANN}/share/info/runtime/version.info": "Version=9.1.0\nversion_dir=cann\n",
        f"{CANN}/share/info/ops_transformer/version.info": sample("files/ops_transformer_version.info.9.1.0"),
        f"{CANN}/x86_64-linux/ascend_toolkit_install.info": sample("files/ascend_toolkit_install.info.9.1.0"),
        f"{CANN}/x86_64-linux/ascend_ops_install.info": sample("files/ascend_toolkit_install.info.9.1.0"),
        f"{CANN}/x86_64-linux/data/platform_config/Ascend950PR_9579.ini": "",
        f"{CANN}/x86_64-linux/tikcpp/ascendc_kernel_cmake/": DIR,
        f"{CANN}/opp/built-in/op_impl/ai_core/tbe/kernel/config/ascend950/": DIR,
        f"{CANN}/opp/built-in/op_impl/aicpu/": DIR,
        f"{CANN}/toolkit/": DIR,
        f"{CANN}/bin/bisheng": "#!/bin/sh\n",
        f"{CANN}/bin/bishengir-compile": "#!/bin/sh\n",
        f"{CANN}/devlib/libascend_hal.so": elf(soname="libascend_hal.so"),
        f"{CANN}/lib64/libascendcl.so": elf(),
        f"{CANN}/lib64/libhccl.so": elf(),
        f"{CANN}/lib64/libopapi.so": elf(defined=("aclnnSparseFlashAttentionGetWorkspaceSize",)),
        f"{ATB}/version.info": sample("files/atb_version.info.9.1.0"),
        f"{ATB}/atb/cxx_abi_1/lib/libatb.so": elf(),
        f"{ATB}/atb/cxx_abi_1/lib/libmki.so": elf(),
        f"{ATB}/atb/cxx_abi_0/lib/libatb.so": elf(),
    },
    "env": {
        "ASCEND_HOME_PATH": CANN,
        "ASCEND_TOOLKIT_HOME": CANN,
        "ASCEND_AICPU_PATH": CANN,
        "ASCEND_OPP_PATH": f"{CANN}/opp",
        "TOOLCHAIN_HOME": f"{CANN}/toolkit",
        "ATB_HOME_PATH": f"{ATB}/atb/cxx_abi_1",
        "LD_LIBRARY_PATH": f"{CANN}/lib64:{ATB}/atb/cxx_abi_1/lib:{DRIVER}/lib64:{DRIVER}/lib64/driver",
        "PATH": f"{CANN}/bin:/usr/local/bin:/usr/bin",
    },
    "tools": {
        "npu-smi info": sample("npu-smi/info_950pr_single_25.7.rc1.6.txt"),
        "npu-smi board": sample("npu-smi/board_950pr_i0.txt"),
        "torch": answers(TORCH_OK, OPS_OK),
        "torch_npu": answers(
            {"ok": True, "version": "2.10.0.post4", "cann": "9.1.0", "loaded": [f"{CANN}/lib64/libascendcl.so.1"]}
        ),
        "bisheng": sample("host/bisheng_version.txt"),
    },
}
H200_TORCH = dict(TORCH_OK, version="2.10.0+cu128", cuda="12.8", archs=["sm_80", "sm_90", "compute_90"])
H200 = {
    "files": {
        **HOST,
        "/etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.4 LTS"\n',
        **pci("0000:1b:00.0", "10de", "2335", "030200"),
        **pci("0000:1c:00.0", "10de", "2335", "030200"),
        **OWN,
        **torch_files("2.10.0+cu128", "12.8"),
        **dist("triton", "3.6.0"),
        **dist("nvidia-nvjitlink-cu12", "12.8.93"),
        **dist("nvidia-nccl-cu12", "2.27.5"),
        f"{SITE}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12": elf(),
        f"{SITE}/triton/backends/nvidia/bin/ptxas": "#!/bin/sh\n",
        **{f"/dev/{n}": "" for n in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")},
        "/proc/driver/nvidia/version": sample("files/proc_driver_nvidia_version.550.90.07").replace(
            "550.90.07", "570.86.15"
        ),
        "/usr/lib64/libcuda.so.570.86.15": elf(),
        "/usr/lib64/libcuda.so.1": "-> libcuda.so.570.86.15",
        "/usr/lib64/libcuda.so": "-> libcuda.so.1",
        "/usr/lib64/libnvidia-ml.so.570.86.15": elf(),
        "/usr/lib64/libnvidia-ml.so.1": "-> libnvidia-ml.so.570.86.15",
        "/usr/bin/nvidia-smi": "#!/bin/sh\n",
        "/usr/bin/g++-12": "#!/bin/sh\n",
        "/usr/bin/c++": "-> g++-12",
    },
    "env": {"PATH": "/usr/local/bin:/usr/bin"},
    "tools": {
        "nvidia-smi": sample("cuda/nvidia_smi_query_h200.csv"),
        "cuda-api": "12080",
        "torch": answers(H200_TORCH, OPS_OK),
        "ptxas": sample("cuda/ptxas_V_12.8.txt"),
        "c++": "12.3.0\n",
    },
}
CPU = {
    "files": {
        **HOST,
        **OWN,
        **torch_files("2.13.0+cpu"),
        **dist("numpy", "2.4.6"),
        "/usr/bin/g++-12": "#!/bin/sh\n",
        "/usr/bin/c++": "-> g++-12",
    },
    "env": {"PATH": "/usr/bin"},
    "tools": {"torch": answers(dict(TORCH_OK, version="2.13.0+cpu"), OPS_OK), "c++": "12.3.0\n"},
}
BASES = {"950": ASCEND_950, "h200": H200, "cpu": CPU}


def changed(base: dict, change: dict) -> dict:
    """A host description with a change laid over it."""
    gone = tuple(change.get("gone", ()))
    merged = {"deny": change.get("deny", {})}
    for part in ("files", "env", "tools"):
        entries = {k: v for k, v in base[part].items() if not (part == "files" and k.startswith(gone) and gone)}
        entries.update(change.get(part, {}))
        merged[part] = {k: v for k, v in entries.items() if v is not None}
    return merged


def write(root: Path, spec: dict) -> None:
    """Write a tree."""
    files = dict(spec["files"])
    if spec["env"] is not None:
        files["/proc/self/environ"] = "".join(f"{k}={v}\0" for k, v in spec["env"].items())
    for path, content in files.items():
        target = f"{root}{path}"
        if content is DIR:
            os.makedirs(target, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if isinstance(content, str) and content.startswith("-> "):
            os.symlink(content[3:], target)
            continue
        data = content.encode() if isinstance(content, str) else content
        with open(target, "wb") as file:
            file.write(data)
        if data.startswith(b"#!"):
            os.chmod(target, 0o755)


class FakeHost(Host):
    """A tree whose programs print what was agreed and whose nodes refuse as agreed."""

    def __init__(self, root: Path, spec: dict) -> None:
        super().__init__(str(root), run=self._answer)
        self._tools, self._deny = spec["tools"], spec["deny"]

    def try_open(self, path: str) -> str:
        return self._deny.get(path.rpartition("/")[2], "")

    def _answer(self, argv, timeout, **_) -> Output:
        name, text = self._program(argv)
        if name is None:
            return Output("missing", 127)
        if isinstance(text, Output):
            return text
        return (
            Output("exit", 0, answer=text)
            if argv[0].endswith(("python", "python3")) or "-c" in argv
            else Output("exit", 0, text)
        )

    def _program(self, argv):
        program = argv[0].rpartition("/")[2]
        if "-c" in argv and "board" not in argv:
            code = argv[argv.index("-c") + 1]
            kinds = (("cuDriverGetVersion", "cuda-api"), ("torch_npu.__version__", "torch_npu"), ("find_spec", "real"))
            name = next((n for token, n in kinds if token in code), "torch")
        elif program == "npu-smi":
            name = "npu-smi " + (argv[argv.index("-t") + 1] if "-t" in argv else "info")
        else:
            name = program
        default = (
            Output("exit", 1) if name in ("real", "npu-smi board", "npu-smi health", "bisheng", "torch_npu") else None
        )
        text = self._tools.get(name, default)
        return (name, text) if text is not None else (None, None)


def facts_of(root: Path, spec: dict, level: str = "import", **more) -> dict:
    """Write the tree and collect its facts."""
    write(root, spec)
    return collect(FakeHost(root, spec), level, **more)
