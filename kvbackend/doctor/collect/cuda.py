"""Facts of the CUDA stack, from files: nodes, kernel and user driver, toolkit, runtime libraries."""

from __future__ import annotations

import re

from kvbackend.doctor import facts, loader
from kvbackend.doctor.collect import python
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host
from kvbackend.doctor.parsers import files

SHADOWED = {
    "libnvJitLink.so.12": "nvidia-nvjitlink-cu12",
    "libnvJitLink.so.13": "nvidia-nvjitlink",
    "libnccl.so.2": "nvidia-nccl-cu12 nvidia-nccl-cu13",
}


def nodes(host: Host) -> Facts:
    """Device nodes, whether each opens, NVSwitches and their manager."""
    names = [n for n in host.list("/dev") if re.fullmatch(r"nvidia\d+|nvidiactl|nvidia-uvm", n)]
    access = {n: host.try_open("/dev/" + n) or "ok" for n in names}
    switches = [n for n in host.list("/dev") if n.startswith("nvidia-nvswitch")]
    manager = (
        any(host.text(f"/proc/{p}/comm").strip() == "nv-fabricmanage" for p in host.list("/proc") if p.isdigit())
        if switches
        else False
    )
    return {
        "cuda.nodes": facts.maybe(names, "/dev"),
        "cuda.node_access": facts.maybe(access, "open(O_RDWR)"),
        "cuda.nvswitch": facts.maybe(switches, "/dev"),
        "cuda.fabricmanager": facts.value(manager, "/proc/*/comm") if switches else facts.absent("/dev"),
    }


def driver(host: Host) -> Facts:
    """The kernel module's version and those of the user libraries."""
    text = host.text("/proc/driver/nvidia/version")
    kernel = files.nvidia_proc_version(text)
    source = "/proc/driver/nvidia/version"
    if not kernel:
        kernel, source = host.text("/sys/module/nvidia/version").strip(), "/sys/module/nvidia/version"
    libcuda, nvml = (loader.find(host, n) for n in ("libcuda.so.1", "libnvidia-ml.so.1"))
    link = loader.find(host, "libcuda.so") + loader.find(host, "stubs/libcuda.so")
    stub = toolkit_home(host) + "/lib64/stubs/libcuda.so"
    return {
        "cuda.driver.kernel": facts.maybe(kernel, source),
        "cuda.libcuda": facts.maybe([host.real(p) for p in libcuda], "ld.so.cache"),
        "cuda.driver.user": facts.maybe(_suffix(host, libcuda, "libcuda.so."), "libcuda.so.1"),
        "cuda.driver.nvml": facts.maybe(_suffix(host, nvml, "libnvidia-ml.so."), "libnvidia-ml.so.1"),
        "cuda.libcuda_link": facts.maybe((link or [stub] if host.exists(stub) else link)[:1], "ld.so.cache"),
        "cuda.smi.path": facts.maybe(host.which("nvidia-smi"), "PATH"),
    }


def _suffix(host: Host, places: list[str], stem: str) -> str:
    """The version in the real name of the first place: libcuda.so.570.86.15."""
    name = host.real(places[0]).rpartition("/")[2] if places else ""
    version = name[len(stem) :] if name.startswith(stem) else ""
    return version if "." in version else ""


def toolkit_home(host: Host) -> str:
    """Where extension builders look: CUDA_HOME or CUDA_PATH, then nvcc on PATH, then /usr/local/cuda."""
    named = [host.environ[v].rstrip("/") for v in ("CUDA_HOME", "CUDA_PATH") if host.environ.get(v)]
    if named:
        return named[0]
    nvcc = host.real(host.which("nvcc") or "/usr/local/cuda/bin/nvcc").rpartition("/bin/")[0]
    whole = [
        p for p in (nvcc, "/usr/local/cuda") if host.exists(p + "/include/cuda.h") or host.exists(p + "/version.json")
    ]
    return whole[0] if whole else nvcc


def toolkit(host: Host) -> Facts:
    """The toolkit, its release, the compilers it accepts, and triton's ptxas."""
    home = toolkit_home(host)
    nvcc = home + "/bin/nvcc"
    version = files.cuda_version_json(host.text(home + "/version.json"))
    if not version:
        header = re.search(r"#define\s+CUDA_VERSION\s+(\d{4,6})", host.text(home + "/include/cuda.h"))
        number = int(header.group(1)) if header else 0
        version = f"{number // 1000}.{number % 1000 // 10}" if number else ""
    limit = files.host_config_gcc(host.text(home + "/include/crt/host_config.h"))
    ptxas = python.package_folder(host, "triton") + "/backends/nvidia/bin/ptxas"
    ptxas = host.environ.get("TRITON_PTXAS_PATH") or ptxas
    return {
        "cuda.toolkit.home": facts.maybe(home if host.is_dir(home) else "", home),
        "cuda.nvcc": facts.maybe(nvcc if host.exists(nvcc) else "", nvcc),
        "cuda.toolkit.version": facts.maybe(version, home),
        "cuda.toolkit.gcc_limit": facts.maybe(limit or None, home),
        "cuda.ptxas.path": facts.maybe(ptxas if host.exists(ptxas) else "", "triton"),
    }


def runtime(host: Host) -> Facts:
    """Runtime libraries of wheels, and older system copies that LD_LIBRARY_PATH puts in front of them."""
    dists = python.distributions(host)
    wheels = sorted({n for f in python.site_folders(host) for n in _wheel_libraries(host, f)})
    shadow: dict[str, dict[str, str]] = {}
    for soname, names in SHADOWED.items():
        wheel = next((dists[n][0]["version"] for n in names.split() if n in dists), "")
        path = next((f + "/" + soname for f in host.paths("LD_LIBRARY_PATH") if host.exists(f + "/" + soname)), "")
        if wheel and path and "site-packages" not in path:
            shadow[soname] = {
                "path": path,
                "version": _suffix(host, [path], soname.partition(".so.")[0] + ".so."),
                "wheel": wheel,
            }
    found = {
        "cuda.wheel_libs": facts.maybe(wheels, "site-packages/nvidia"),
        "cuda.shadow": facts.maybe(shadow, "LD_LIBRARY_PATH"),
    }
    for key, stem in (("jitlink", "libnvJitLink"), ("nccl", "libnccl")):
        entry = next((v for k, v in shadow.items() if k.startswith(stem)), None)
        found[f"cuda.shadow.{key}"] = facts.maybe((entry or {}).get("version"), (entry or {}).get("path", ""))
        found[f"cuda.shadow.{key}_wheel"] = facts.maybe((entry or {}).get("wheel"), "dist-info")
    return found


def _wheel_libraries(host: Host, folder: str) -> list[str]:
    base = folder + "/nvidia"
    return [n for p in host.list(base) for n in host.list(f"{base}/{p}/lib") if re.search(r"\.so\.\d+$", n)]
