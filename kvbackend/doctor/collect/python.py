"""Facts of the Python side: interpreter, distributions, torch and its companions, read from files alone."""

from __future__ import annotations

import re
import sys

from kvbackend.doctor import facts, loader
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host
from kvbackend.doctor.parsers import files

REPORTED = (
    "torch",
    "torch-npu",
    "torchvision",
    "torchaudio",
    "triton",
    "triton-ascend",
    "vllm",
    "vllm-ascend",
    "sglang",
    "numpy",
    "transformers",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "flash-mla",
    "kvbackend",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-nvjitlink-cu12",
    "nvidia-nvjitlink",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime",
    "nvidia-ml-py",
    "mooncake-transfer-engine",
)
# import names of what CANN's operator compiler imports
TBE_MODULES = (
    "attr",
    "decorator",
    "psutil",
    "scipy",
    "sympy",
    "cffi",
    "yaml",
    "numpy",
    "google",
    "cloudpickle",
    "tornado",
    "absl",
    "ml_dtypes",
)
_IN_TREE = ("/usr/lib", "/usr/local/lib", "/opt/conda/lib", "/opt/venv/lib")


def site_folders(host: Host) -> list[str]:
    """Where packages are installed, in import order."""
    if host.live:
        return host.memo("sites", lambda: [p for p in dict.fromkeys(sys.path[1:]) if p and host.is_dir(p)])
    return host.memo("sites", lambda: _sites_of_tree(host))


def _sites_of_tree(host: Host) -> list[str]:
    roots = [host.environ[v] + "/lib" for v in ("VIRTUAL_ENV", "CONDA_PREFIX") if v in host.environ]
    roots += list(_IN_TREE) + [f"/usr/local/{n}/lib" for n in host.list("/usr/local") if n.startswith("python3")]
    found = host.paths("PYTHONPATH")
    for root in roots:
        for name in host.list(root):
            if re.fullmatch(r"python3(\.\d+)?", name):
                found += [f"{root}/{name}/{kind}" for kind in ("site-packages", "dist-packages")]
    return [p for p in dict.fromkeys(found) if host.is_dir(p)]


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(host: Host) -> dict[str, list[dict[str, str]]]:
    """Every installed distribution: name -> places, in import order."""

    def scan() -> dict[str, list[dict[str, str]]]:
        found: dict[str, list[dict[str, str]]] = {}
        for folder in site_folders(host):
            for entry in host.list(folder):
                match = re.fullmatch(r"(.+?)-(\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info", entry)
                if match:
                    found.setdefault(normal(match.group(1)), []).append({"version": match.group(2), "folder": folder})
        return found

    return host.memo("dists", scan)


def version_of(host: Host, name: str) -> str | None:
    """The version of a distribution that an import would use, None when it is not installed."""
    places = distributions(host).get(normal(name))
    return places[0]["version"] if places else None


def package_folder(host: Host, package: str) -> str:
    """The folder an import of `package` would use, '' when there is none."""
    return next((f + "/" + package for f in site_folders(host) if host.is_dir(f + "/" + package)), "")


def interpreter(host: Host) -> Facts:
    """The Python release, the distributions that matter, doubles, and what shadows an installed package."""
    if host.live:
        version = facts.value(".".join(map(str, sys.version_info[:3])), sys.executable)
    else:
        names = [m.group(1) for m in (re.search(r"python(3\.\d+)/", f + "/") for f in site_folders(host)) if m]
        version = facts.maybe(names[0] if names else "", "site-packages")
    places = distributions(host)
    doubles = {
        name: sorted({p["version"] for p in found})
        for name, found in places.items()
        if name in REPORTED and len({p["version"] for p in found}) > 1
    }
    return {
        "py.version": version,
        "py.dists": facts.maybe({n: places[n][0]["version"] for n in REPORTED if n in places}),
        "py.duplicates": facts.maybe(doubles, "dist-info"),
        "py.shadow": facts.maybe(_shadow(host)),
        "py.numpy": facts.maybe(version_of(host, "numpy"), "dist-info"),
        "py.tbe_missing": facts.maybe(_tbe_missing(host), "site-packages"),
    }


def _shadow(host: Host) -> list[str]:
    """Folders ahead of site-packages that hold a `torch` or `torch_npu` without a compiled part."""
    import os

    ahead = ([os.getcwd()] if host.live else [host.environ.get("PWD", "")]) + host.paths("PYTHONPATH")
    found = []
    for folder in dict.fromkeys(f for f in ahead if f):
        for package in ("torch", "torch_npu"):
            names = host.list(folder + "/" + package)
            compiled = any(n.startswith("_C.") or n == "_C" for n in names)
            if "__init__.py" in names and not compiled:
                found.append(folder + "/" + package)
    return found


def _tbe_missing(host: Host) -> list[str]:
    if not site_folders(host):
        return []
    names = {n for f in site_folders(host) for n in host.list(f)}
    return [m for m in TBE_MODULES if m not in names and m + ".py" not in names]


def torch(host: Host) -> Facts:
    """torch without importing it: version, CUDA release, C++ ABI."""
    folder = package_folder(host, "torch")
    text = host.text(folder + "/version.py") if folder else ""
    version = files.python_assignment(text, "__version__") or version_of(host, "torch")
    found: Facts = {
        "torch.version": facts.maybe(version, folder + "/version.py" if text else "dist-info"),
        "torch.folder": facts.maybe(folder),
        "torch.cuda": facts.absent(folder),
    }
    if text:
        cuda, hip = files.python_assignment(text, "cuda"), files.python_assignment(text, "hip")
        found["torch.cuda"] = facts.maybe(cuda, folder + "/version.py")
        found["torch.hip"] = facts.maybe(hip, folder + "/version.py")
    found["torch.abi"] = _abi(host, folder + "/lib/libc10.so")
    return found


def _abi(host: Host, path: str) -> facts.Fact:
    """1 when the library's strings are of the new C++ ABI, 0 when of the old one."""
    library = loader.read(host, path)
    if library is None:
        return facts.absent(path)
    if any("__cxx11" in name for name in library.defined):
        return facts.value(1, path)
    return facts.value(0, path) if any(re.search(r"RKSs|ESs", n) for n in library.defined) else facts.absent(path)


def companions(host: Host) -> Facts:
    """torch_npu, triton, vllm-ascend, flashinfer, and compiled packages whose libraries resolve nowhere."""
    folder = package_folder(host, "torch_npu")
    text = host.text(folder + "/version.py") if folder else ""
    version = files.python_assignment(text, "__version__") or version_of(host, "torch-npu")
    found: Facts = {
        "torch_npu.version": facts.maybe(version, folder + "/version.py" if text else "dist-info"),
        "torch_npu.folder": facts.maybe(folder),
    }
    for key, name in (
        ("triton.version", "triton"),
        ("triton_ascend.version", "triton-ascend"),
        ("vllm_ascend.version", "vllm-ascend"),
        ("flashinfer.version", "flashinfer-python"),
    ):
        found[key] = facts.maybe(version_of(host, name), "dist-info")
    backends = package_folder(host, "triton") + "/backends"
    found["triton.backends"] = facts.maybe(
        [n for n in host.list(backends) if host.is_dir(backends + "/" + n) and not n.startswith("_")],
        backends,
    )
    others = {n: version_of(host, n) for n in ("flashinfer-cubin", "flashinfer-jit-cache") if version_of(host, n)}
    found["flashinfer.companions"] = facts.maybe(others, "dist-info")
    found["py.unresolved"] = facts.maybe(_unresolved(host), "DT_NEEDED")
    transport = package_folder(host, "mooncake")
    places = loader.find(host, "ascend_transport.so", (transport,))
    found["mooncake.transport"] = facts.value(bool(places), transport) if transport else facts.absent("site-packages")
    info = host.text(package_folder(host, "vllm_ascend") + "/_build_info.py")
    found["vllm_ascend.device_type"] = facts.maybe(files.python_assignment(info, "__device_type__"), "_build_info.py")
    return found


def _unresolved(host: Host) -> dict[str, list[str]]:
    """Compiled companions of torch -> needed libraries that neither torch's folder nor the loader has."""
    torch_lib = package_folder(host, "torch") + "/lib"
    found: dict[str, list[str]] = {}
    for package in ("torchvision", "torchaudio", "torch_npu"):
        folder = package_folder(host, package)
        inside = [folder + "/" + n for n in host.list(folder)] + [
            folder + "/lib/" + n for n in host.list(folder + "/lib")
        ]
        for path in inside:
            if re.search(r"\.so(\.\d+)*$", path):
                loose = loader.unresolved(host, path, (torch_lib, folder + "/lib"))
                if loose:
                    found[path] = loose
    return found
