"""For every failure kind: a host that shows it and a near miss that does not.

Each entry is (base, change that fires, change that is a near miss, options). A kind that is known by a log alone has
a `log` in its options: it fires when this host, or the text itself, supports it; `other_log` is the near miss.
"""

from __future__ import annotations

from kvbackend.doctor.process import Output

from .roots import (
    ATB,
    CANN,
    DIR,
    DRIVER,
    H200_TORCH,
    OPS_OK,
    SITE,
    TORCH_OK,
    answers,
    dist,
    elf,
    pci,
    sample,
    torch_files,
)

UNSOURCED = dict.fromkeys(
    ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_AICPU_PATH", "ASCEND_OPP_PATH", "TOOLCHAIN_HOME")
)
OLD = "/usr/local/Ascend/cann-8.2.RC1"
OLD_ENV = {
    "ASCEND_HOME_PATH": OLD,
    "ASCEND_TOOLKIT_HOME": OLD,
    "ASCEND_AICPU_PATH": OLD,
    "ASCEND_OPP_PATH": f"{OLD}/opp",
    "TOOLCHAIN_HOME": None,
    "LD_LIBRARY_PATH": f"{CANN}/lib64:{DRIVER}/lib64/driver",
}
OLD_TREE = {
    f"{OLD}/runtime/": DIR,
    f"{OLD}/compiler/": DIR,
    f"{OLD}/opp/": DIR,
    f"{OLD}/x86_64-linux/ascend_toolkit_install.info": sample("files/ascend_toolkit_install.info.8.2.RC1"),
}
KERNELS = f"{CANN}/opp/built-in/op_impl/ai_core/tbe/kernel"
OWN = f"{SITE}/kvbackend/_lib/libkvbackend_cpu.so"
INFO = f"{CANN}/x86_64-linux/ascend_toolkit_install.info"
SMI, DRIVER_INFO = "npu-smi info", f"{DRIVER}/version.info"
NO_NODES = {"gone": ["/dev/davinci"]}
TWO_CARDS = {
    "files": {"/dev/davinci1": ""},
    "tools": {SMI: sample("npu-smi/info_950pr_25.7.rc1.6.txt").replace("Alarm", "OK   ")},
}


def smi(text: str) -> dict:
    return {"tools": {SMI: Output("exit", 255, "", text)}}


def env(**values: str | None) -> dict:
    return {"env": values}


def files(*parts: dict, **options: dict) -> dict:
    merged: dict = {}
    for part in parts:
        merged.update(part)
    return {"files": merged, **options}


def own(**lib: object) -> dict:
    parts = {"needed": ("libc10.so",), "defined": ("kvbackend_stamp",), **lib}
    return {"files": {OWN: elf(**parts)}}


def chip(device: str, **more: dict) -> dict:
    return {
        "files": {**pci("0000:71:00.0", "19e5", device, "120000"), **more},
        "tools": {SMI: None, "npu-smi board": None},
    }


def board(**lines: str) -> dict:
    text = sample("npu-smi/board_950pr_i0.txt")
    for name, value in lines.items():
        old = next(line for line in text.splitlines() if line.strip().startswith(name.replace("_", " ")))
        text = text.replace(old, old.partition(":")[0] + ": " + value)
    return {"tools": {"npu-smi board": text}}


def another_torch(version: str, **more: object) -> dict:
    """In place of the CPU host's; `more`: files."""
    answer = answers(dict(TORCH_OK, version=version), OPS_OK)
    return files(torch_files(version), more, gone=[f"{SITE}/torch-2.13.0"], tools={"torch": answer})


def torch(**fields: object) -> dict:
    return {"tools": {"torch": answers(dict(H200_TORCH, **fields), OPS_OK)}}


# it lacks what our library needs of newer ones, so that is not loaded either
OLD_TORCH = another_torch("2.9.1+cpu", **{f"{SITE}/torch/lib/libtorch_cpu.so": elf(defined=("_ZN5torch3barEv",))})
OLD_TORCH["tools"]["torch"] = answers(
    dict(TORCH_OK, version="2.9.1+cpu"),
    dict(OPS_OK, libraries={"cpu": {"reason": "torch is 2.9.1+cpu; the kernels need 2.10 or newer", "ops": []}}),
)
E950, GPU, HERE = "950", "h200", "cpu"
DRIVER_OLD = files({DRIVER_INFO: sample("files/driver_version.info.25.0.rc1.1")})
DRIVER_25_2 = files({DRIVER_INFO: "Version=25.2.0\n"})
KINDS: dict[str, tuple] = {
    "asc-env-not-sourced-libhccl": (
        E950,
        env(**UNSOURCED, LD_LIBRARY_PATH=None),
        env(**UNSOURCED, LD_LIBRARY_PATH=f"{CANN}/lib64"),
    ),
    "asc-libascendcl-missing": (
        E950,
        env(LD_LIBRARY_PATH=f"{DRIVER}/lib64/driver"),
        env(LD_LIBRARY_PATH=f"{CANN}/lib64"),
    ),
    "asc-libascend-hal-missing": (E950, {"gone": [f"{DRIVER}/lib64"]}, env(LD_LIBRARY_PATH=f"{CANN}/lib64")),
    "asc-opp-path-unset": (E950, env(ASCEND_OPP_PATH=None), env(ASCEND_AICPU_PATH=None)),
    "asc-home-path-dangling": (E950, {"gone": [f"{CANN}/compiler"]}, {"gone": [f"{CANN}/toolkit"]}),
    "asc-hardcoded-old-layout": (
        E950,
        {},
        files({"/usr/local/Ascend/ascend-toolkit/latest": f"-> {CANN}"}),
        {"log": "bash: /usr/local/Ascend/ascend-toolkit/set_env.sh: No such file or directory"},
    ),
    "asc-set-env-strict-shell": (
        E950,
        {
            **files({"/etc/ascend_install.info": sample("files/etc_ascend_install.info.container_nokey")}),
            **env(**UNSOURCED),
        },
        files({"/etc/ascend_install.info": sample("files/etc_ascend_install.info.container_nokey")}),
    ),
    "asc-stub-hal-first": (
        E950,
        env(LD_LIBRARY_PATH=f"{CANN}/devlib:{CANN}/lib64:{DRIVER}/lib64/driver"),
        env(LD_LIBRARY_PATH=f"{CANN}/lib64:{DRIVER}/lib64/driver:{CANN}/devlib"),
    ),
    "asc-static-tls": (
        E950,
        files({"/usr/lib64/libc.so.6": elf(machine=183, strings=("GLIBC_2.38",))}),
        {},
        {"log": "libgomp.so.1: cannot allocate memory in static TLS block"},
    ),
    "asc-source-tree-shadow": (
        E950,
        {**files({"/src/torch_npu/__init__.py": ""}), **env(PYTHONPATH="/src")},
        {**files({"/src/torch_npu/__init__.py": "", "/src/torch_npu/_C.so": elf()}), **env(PYTHONPATH="/src")},
    ),
    "asc-two-accelerator-backends": (
        E950,
        {**files(torch_files("2.10.0+cpu", "12.8")), "tools": {"torch_npu": None}},
        files(torch_files("2.10.0+cpu", "12.8")),
    ),
    "asc-torch-pair-mismatch": (
        E950,
        {"gone": [f"{SITE}/torch/", f"{SITE}/torch-"], **files(torch_files("2.9.1+cpu"))},
        {"gone": [f"{SITE}/torch/", f"{SITE}/torch-"], **files(torch_files("2.10.0"))},
    ),
    "asc-ext-vs-torch-npu-symbol": (E950, own(undefined=("_ZN7c10_npu3newEv",)), own(undefined=("_ZN7c10_npu3fooEv",))),
    "asc-ext-vs-torch-symbol": (HERE, own(undefined=("_ZN5torch7LibraryC1Ev",)), own(undefined=("_ZN5torch3barEv",))),
    "asc-libatb-missing": (
        E950,
        env(ATB_HOME_PATH=None, LD_LIBRARY_PATH=f"{CANN}/lib64:{DRIVER}/lib64/driver"),
        {},
        {"log": "OSError: libatb.so: cannot open shared object file: No such file"},
    ),
    "asc-atb-too-old": (
        E950,
        files({f"{ATB}/version.info": sample("files/atb_version.info.9.1.0").replace("9.1.0", "8.5.0")}),
        files({f"{ATB}/version.info": sample("files/atb_version.info.9.1.0").replace("9.1.0", "9.1.1")}),
    ),
    "asc-atb-mixed-trees": (
        E950,
        {
            "gone": [f"{ATB}/atb/cxx_abi_1/lib/libmki"],
            **files({"/opt/atb/libmki.so": elf()}),
            **env(LD_LIBRARY_PATH=f"{CANN}/lib64:{ATB}/atb/cxx_abi_1/lib:/opt/atb:{DRIVER}/lib64/driver"),
        },
        {"gone": [f"{ATB}/atb/cxx_abi_1/lib/libmki"]},
    ),
    "asc-atb-abi": (E950, env(ATB_HOME_PATH=f"{ATB}/atb/cxx_abi_0"), env(ATB_HOME_PATH=f"{ATB}/atb")),
    "asc-op-missing-in-torch-npu": (
        E950,
        files(dist("vllm-ascend", "0.22.1rc1")),
        files(dist("vllm-ascend", "0.23.0")),
        {"log": "AttributeError: module 'torch_npu' has no attribute '_npu_flash_attention'"},
    ),
    "asc-expandable-segments": (
        E950,
        {**DRIVER_OLD, **env(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")},
        env(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"),
    ),
    "asc-numpy2": (
        E950,
        {"gone": [f"{SITE}/numpy-"], **files(dist("numpy", "2.1.0"), OLD_TREE), "env": OLD_ENV},
        {"gone": [f"{SITE}/numpy-"], **files(dist("numpy", "2.1.0"))},
    ),
    "asc-tbe-python-deps": (
        E950,
        {"gone": [f"{SITE}/attr/"]},
        {"gone": [f"{SITE}/attr/"], **files({f"{SITE}/attr.py": ""})},
    ),
    "asc-kernels-package-missing": (
        E950,
        {"gone": [KERNELS]},
        {"gone": [f"{CANN}/x86_64-linux/ascend_ops_install.info"]},
    ),
    "asc-aclnn-not-in-libopapi": (
        E950,
        {},
        files({f"{CANN}/lib64/libopapi_nn.so": elf(defined=("aclnnNewGetWorkspaceSize",))}),
        {"log": "aclnnNew or aclnnNewGetWorkspaceSize not in libopapi.so, or libopapi.sonot found"},
    ),
    "asc-custom-opp-not-registered": (
        E950,
        files({f"{SITE}/vllm_ascend/vendors/x/": DIR}),
        {**files({f"{SITE}/vllm_ascend/vendors/x/": DIR}), **env(ASCEND_CUSTOM_OPP_PATH=f"{SITE}/vllm_ascend/vendors")},
        {"log": "aclnnAddRmsNormBiasGetWorkspaceSize not in libopapi.so"},
    ),
    "asc-unsupported-soc-950": (E950, {"gone": [f"{SITE}/torch_npu-"], **files(dist("torch-npu", "2.9.0"))}, {}),
    "asc-unsupported-soc-310b": (
        E950,
        board(Chip_Name="Ascend310B4", NPU_Name="x"),
        {},
        {"log": "Unsupported soc version: Ascend310B4"},
    ),
    "asc-soc-104-is-910a": (
        E950,
        chip("d801"),
        chip("d802"),
        {"log": "RuntimeError: Can not support soc_version: 104."},
    ),
    "asc-wheel-for-other-chip": (
        E950,
        files({f"{SITE}/vllm_ascend/_build_info.py": "__device_type__ = 'A2'\n"}),
        files({f"{SITE}/vllm_ascend/_build_info.py": "__device_type__ = 'A5'\n"}),
    ),
    "asc-op-bin-socversion": (
        E950,
        {"gone": [KERNELS], **files({f"{KERNELS}/ascend910b/": DIR})},
        {"gone": [KERNELS], **files({f"{KERNELS}/ascend910_95/": DIR})},
    ),
    "asc-platform-info-missing": (E950, board(NPU_Name="9599"), board(NPU_Name="9579")),
    "asc-op-not-for-950": (E950, {}, chip("d802"), {"log": "op compressor not support soc version ascend950"}),
    "asc-opp-verify-e30006": (E950, DRIVER_OLD, {}, {"log": "E30006: Failed to verify the OPP"}),
    "asc-aicpu-so-open": (E950, {"gone": [f"{CANN}/opp/built-in/op_impl/aicpu"]}, {}, {"log": "E39999 open so failed"}),
    "asc-cmake-dir-missing": (
        E950,
        {"gone": [f"{CANN}/x86_64-linux/tikcpp"]},
        {"gone": [f"{CANN}/x86_64-linux/tikcpp"], **files({f"{CANN}/tools/tikcpp/ascendc_kernel_cmake/": DIR})},
        {"purpose": "build"},
    ),
    "asc-ascend-transport-missing": (
        E950,
        files({f"{SITE}/mooncake/__init__.py": ""}),
        files({f"{SITE}/mooncake/ascend_transport.so": elf()}),
        {"log": "ImportError: ascend_transport.so: cannot open shared object file"},
    ),
    "asc-build-vs-runtime-cann": (
        E950,
        {},
        {},
        {"log": "CANN version mismatch. The build version is 8.5.0", "other_log": "CANN version is 8.5.0"},
    ),
    "asc-cann-torch-map-warning": (
        E950,
        {"gone": [f"{SITE}/torch_npu-"], **files(dist("torch-npu", "2.9.1"))},
        {},
        {"log": "CANN package version 9.1 and torch_npu's do not match. Please check"},
    ),
    "asc-npu-smi-8020-busy": (E950, smi(sample("npu-smi/err_dcmi_8020.txt")), smi(sample("npu-smi/err_bad_param.txt"))),
    "asc-npu-smi-8005": (E950, smi(sample("npu-smi/err_dcmi_8005.txt")), smi(sample("npu-smi/err_dcmi_8020.txt"))),
    "asc-npu-smi-libc-sec": (E950, smi(sample("npu-smi/err_libc_sec.txt")), smi(sample("npu-smi/err_dcmi_8005.txt"))),
    "asc-nonroot-node-permission": (E950, {"deny": {"davinci0": "EACCES"}}, {"deny": {"davinci0": "EBUSY"}}),
    "asc-libdcmi-not-mounted": (E950, {"gone": ["/usr/local/dcmi"]}, {}, {"log": "DCMI library not found"}),
    "asc-driver-too-old": (E950, DRIVER_OLD, DRIVER_25_2),
    "asc-host-lib-mix": (
        E950,
        {
            **files({"/opt/old/lib64/libascend_hal.so": elf()}),
            **env(LD_LIBRARY_PATH=f"{CANN}/lib64:/opt/old/lib64:{DRIVER}/lib64/driver"),
        },
        env(LD_LIBRARY_PATH=f"{CANN}/lib64:{CANN}/devlib:{DRIVER}/lib64/driver"),
    ),
    "asc-hccl-init-driver": (E950, DRIVER_OLD, DRIVER_25_2, {"log": "HCCL function error, error code is 1"}),
    "asc-hccp-leftover": (
        E950,
        {"tools": {SMI: sample("npu-smi/info_950pr_25.7.rc1.6.txt")}},
        {},
        {"log": "EJ0001: Failed to initialize the HCCP process"},
    ),
    "asc-p2p-enable-507899": (E950, TWO_CARDS, {}, {"log": "halDeviceEnableP2P failed, drvRetCode=17"}),
    "asc-heartbeat-lost": (
        E950,
        {"tools": {SMI: sample("npu-smi/info_950pr_25.7.rc1.6.txt")}},
        {},
        {"log": "EL0001: the device lost heartbeat"},
    ),
    "asc-card-health-alarm": (
        E950,
        {
            "tools": {
                SMI: sample("npu-smi/info_950pr_25.7.rc1.6.txt"),
                "npu-smi health": sample("npu-smi/health_alarm_i0.txt"),
            }
        },
        TWO_CARDS,
    ),
    "asc-aclinit-507008": (E950, NO_NODES, {}, {"log": "aclInit failed, error code is 507008"}),
    "asc-stream-resources": (
        E950,
        {"tools": {SMI: sample("npu-smi/info_a3_2card_4chip_25.0.rc1.1.txt")}},
        {},
        {"log": "error code 207008"},
    ),
    "asc-mask-out-of-range": (E950, env(ASCEND_RT_VISIBLE_DEVICES="1"), env(ASCEND_RT_VISIBLE_DEVICES="0")),
    "asc-mask-not-ascending": (E950, env(ASCEND_RT_VISIBLE_DEVICES="1,0"), env(ASCEND_RT_VISIBLE_DEVICES="0,1")),
    "asc-fork-after-init": (
        E950,
        {},
        {},
        {"log": "Cannot re-initialize NPU in forked subprocess.", "other_log": "forked subprocess"},
    ),
    "asc-triton-clobber": (
        E950,
        files(dist("triton", "3.5.0")),
        {"gone": [f"{SITE}/triton_ascend"], **files(dist("triton", "3.5.0"))},
    ),
    "asc-uid-without-passwd": (
        E950,
        files({"/etc/passwd": "me:x:1000:1000::/:/bin/sh\n"}),
        files({"/etc/passwd": "other:x:0:0::/:/bin/sh\n"}),
    ),
    "asc-bishengir-unknown-soc": (
        E950,
        {},
        {"tools": {"npu-smi board": None}},
        {"log": "Cannot find option named 'Ascend910B4-1'"},
    ),
    "asc-bishengir-not-found": (
        E950,
        {"gone": [f"{CANN}/bin/bishengir"]},
        {
            "gone": [f"{CANN}/bin/bishengir"],
            **files({f"{SITE}/triton/backends/ascend/bishengir/bin/bishengir-compile": ""}),
        },
        {"purpose": "jit"},
    ),
    "asc-bishengir-pipeline": (
        E950,
        {"gone": [f"{SITE}/triton_ascend"], **files(dist("triton-ascend", "3.2.0"))},
        {},
        {"log": "Failed to run BiShengIR pipeline"},
    ),
    "asc-triton-not-on-pypi": (
        E950,
        {},
        {},
        {
            "log": "No matching distribution found for triton-ascend==3.2.1",
            "other_log": "No matching distribution found for foo",
        },
    ),
    "cuda-no-kernel-image": (GPU, torch(archs=["sm_80", "sm_100"]), torch(archs=["compute_80"])),
    "cuda-driver-insufficient": (
        GPU,
        files(
            {
                "/proc/driver/nvidia/version": sample("files/proc_driver_nvidia_version.550.90.07").replace(
                    "550.90.07", "515.65.01"
                )
            }
        ),
        files(
            {
                "/proc/driver/nvidia/version": sample("files/proc_driver_nvidia_version.550.90.07").replace(
                    "550.90.07", "525.60.13"
                )
            }
        ),
    ),
    "cuda-unsupported-ptx": (
        GPU,
        {"tools": {"ptxas": sample("cuda/ptxas_V_12.8.txt").replace("12.8", "13.0")}},
        {},
        {"log": "the provided PTX was compiled with an unsupported toolchain"},
    ),
    "cuda-804-forward-compat": (
        GPU,
        {**files({"/usr/local/cuda/compat/libcuda.so.1": elf()}), **env(LD_LIBRARY_PATH="/usr/local/cuda/compat")},
        {},
        {"log": "Error 804: forward compatibility was attempted on non supported HW"},
    ),
    "cuda-802-fabric-manager": (
        GPU,
        files({"/dev/nvidia-nvswitch0": ""}),
        files({"/dev/nvidia-nvswitch0": "", "/proc/77/comm": "nv-fabricmanage\n"}),
    ),
    "cuda-nvml-mismatch": (
        GPU,
        {"tools": {"nvidia-smi": Output("exit", 18, sample("cuda/nvidia_smi_mismatch.txt"))}},
        {"tools": {"nvidia-smi": Output("exit", 9, sample("cuda/nvidia_smi_nodriver.txt"))}},
    ),
    "cuda-nvml-unknown-container": (
        GPU,
        {"tools": {"nvidia-smi": Output("exit", 255, sample("cuda/nvidia_smi_unknown.txt"))}},
        {"deny": {"nvidia0": "EBUSY"}},
    ),
    "cuda-libcuda-missing": (GPU, {"gone": ["/usr/lib64/libcuda"]}, {"gone": ["/usr/lib64/libnvidia-ml"]}),
    "cuda-lcuda-link": (GPU, files({"/usr/lib64/libcuda.so": None}), {}, {"log": "/usr/bin/ld: cannot find -lcuda"}),
    "cuda-ptxas-arch": (
        GPU,
        {"tools": {"ptxas": sample("cuda/ptxas_V_12.8.txt").replace("12.8", "11.7")}},
        {"tools": {"ptxas": sample("cuda/ptxas_V_12.8.txt").replace("12.8", "11.8")}},
    ),
    "cuda-nvcc-vs-torch": (
        GPU,
        files({"/usr/local/cuda/version.json": '{"cuda": {"version": "13.0.2"}}'}),
        files({"/usr/local/cuda/version.json": '{"cuda": {"version": "12.6.3"}}'}),
        {"purpose": "build"},
    ),
    "cuda-gcc-too-new": (
        GPU,
        files(
            {
                "/usr/local/cuda/version.json": '{"cuda": {"version": "12.8"}}',
                "/usr/local/cuda/include/crt/host_config.h": "#if __GNUC__ > 11\n",
            }
        ),
        files(
            {
                "/usr/local/cuda/version.json": '{"cuda": {"version": "12.8"}}',
                "/usr/local/cuda/include/crt/host_config.h": "#if __GNUC__ > 12\n",
            }
        ),
        {"purpose": "build"},
    ),
    "cuda-nvcc-missing": (GPU, {}, files({"/usr/local/cuda/bin/nvcc": "#!/bin/sh\n"}), {"purpose": "jit"}),
    "cuda-nvjitlink": (
        GPU,
        {
            **files(
                {
                    "/opt/cuda/libnvJitLink.so.12.4.99": elf(),
                    "/opt/cuda/libnvJitLink.so.12": "-> libnvJitLink.so.12.4.99",
                }
            ),
            **env(LD_LIBRARY_PATH="/opt/cuda"),
        },
        {
            **files(
                {"/opt/cuda/libnvJitLink.so.12.9.1": elf(), "/opt/cuda/libnvJitLink.so.12": "-> libnvJitLink.so.12.9.1"}
            ),
            **env(LD_LIBRARY_PATH="/opt/cuda"),
        },
    ),
    "cuda-nccl-symbol": (
        GPU,
        {
            **files({"/opt/nccl/libnccl.so.2.18.1": elf(), "/opt/nccl/libnccl.so.2": "-> libnccl.so.2.18.1"}),
            **env(LD_LIBRARY_PATH="/opt/nccl"),
        },
        {
            **files({"/opt/nccl/libnccl.so.2.28.1": elf(), "/opt/nccl/libnccl.so.2": "-> libnccl.so.2.28.1"}),
            **env(LD_LIBRARY_PATH="/opt/nccl"),
        },
    ),
    "cuda-cxx11-abi": (
        GPU,
        own(undefined=("_ZN5torch3jit17parseSchemaOrNameERKSsb",)),
        own(undefined=("_ZN5torch3barEv",)),
    ),
    "cuda-libnvrtc-missing": (
        GPU,
        {"gone": [f"{SITE}/nvidia/cuda_nvrtc"]},
        {},
        {"log": "libnvrtc.so.12: cannot open shared object file"},
    ),
    "cuda-flashinfer-companion": (
        GPU,
        files(dist("flashinfer-python", "0.6.1"), dist("flashinfer-cubin", "0.6.0")),
        files(dist("flashinfer-python", "0.6.1"), dist("flashinfer-cubin", "0.6.1+cu128")),
    ),
    "cuda-fork-after-init": (
        GPU,
        {},
        {},
        {"log": "Cannot re-initialize CUDA in forked subprocess", "other_log": "forked subprocess"},
    ),
    "cuda-cpu-torch-on-gpu": (
        GPU,
        {"gone": [f"{SITE}/torch/", f"{SITE}/torch-"], **files(torch_files("2.10.0+cpu"))},
        {},
    ),
    "com-glibcxx": (HERE, own(strings=("GLIBCXX_3.4.33",)), own(strings=("GLIBCXX_3.4.32",))),
    "com-glibc": (HERE, own(strings=("GLIBC_2.39",)), own(strings=("GLIBC_2.38",))),
    "asc-nodes-missing": (E950, NO_NODES, {"gone": ["/dev/hisi_hdc"]}),
    "asc-node-cgroup-denied": (E950, {"deny": {"davinci0": "EPERM"}}, {"deny": {"davinci0": "EACCES"}}),
    "asc-hdc-missing": (E950, {"gone": ["/dev/hisi_hdc"]}, {}),
    "asc-svm-missing": (E950, chip("d802"), chip("d802", **{"/dev/devmm_svm": ""})),
    "asc-firmware-pair": (
        E950,
        {
            **DRIVER_OLD,
            **files(
                {
                    DRIVER_INFO: sample("files/driver_version.info.25.0.rc1.1"),
                    "/usr/local/Ascend/firmware/version.info": "Version=7.8.0.1\n",
                }
            ),
        },
        files(
            {
                DRIVER_INFO: sample("files/driver_version.info.25.0.rc1.1"),
                "/usr/local/Ascend/firmware/version.info": sample("files/firmware_version.info.7.7.0.1.231"),
            }
        ),
    ),
    "asc-smi-incompatible": (E950, board(Compatibility="INCOMPATIBLE"), board(Compatibility="NA")),
    "asc-package-ranges": (
        E950,
        files({f"{CANN}/share/info/runtime/version.info": "Version=9.0.0\nversion_dir=cann\n"}),
        files({f"{CANN}/share/info/runtime/version.info": "Version=9.1.1\nversion_dir=cann\n"}),
    ),
    "asc-mixed-trees": (
        E950,
        {**files(OLD_TREE), **env(ASCEND_OPP_PATH=f"{OLD}/opp")},
        {**files({"/usr/local/Ascend/cann": f"-> {CANN}"}), **env(ASCEND_OPP_PATH="/usr/local/Ascend/cann/opp")},
    ),
    "asc-loaded-other-cann": (
        E950,
        {"tools": {"torch_npu": answers({"ok": True, "loaded": [f"{OLD}/lib64/libascendcl.so"]})}},
        {},
    ),
    "asc-alloc-conf-both": (
        E950,
        env(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="x:1"),
        env(PYTORCH_ALLOC_CONF="x:1"),
    ),
    "asc-alloc-conf-950": (
        E950,
        env(PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:64"),
        env(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"),
    ),
    "cuda-nodes-missing": (GPU, {"gone": ["/dev/nvidia"]}, {"gone": ["/dev/nvidia1"]}),
    "cuda-torch-pair": (
        GPU,
        {
            "tools": {
                "torch": answers({"ok": False, "error": "ImportError: libcudart.so.12: cannot open shared object file"})
            }
        },
        {
            "tools": {
                "torch": answers({"ok": False, "error": "ImportError: libother.so: cannot open shared object file"})
            }
        },
    ),
    "com-torch-missing": (HERE, {"gone": [f"{SITE}/torch"]}, {"gone": [f"{SITE}/numpy"]}),
    "com-duplicate-dists": (
        HERE,
        files(dist("numpy", "1.26.4")),
        files(dist("anything", "1"), dist("anything-else", "2")),
    ),
    "com-torch-shadow": (
        HERE,
        {**files({"/src/torch/__init__.py": ""}), **env(PYTHONPATH="/src")},
        {**files({"/src/torch/readme.txt": ""}), **env(PYTHONPATH="/src")},
    ),
    "com-unresolved-libs": (
        HERE,
        files({f"{SITE}/torchvision/_C.so": elf(needed=("libtorch_cuda.so",))}),
        files({f"{SITE}/torchvision/_C.so": elf(needed=("libc10.so",))}),
    ),
    "com-torch-too-old": (HERE, OLD_TORCH, another_torch("2.10.0+cpu")),
    "com-ext-unresolved": (HERE, own(needed=("libgone.so.1",)), own(needed=("libc.so.6",))),
    "com-ext-other-machine": (HERE, own(machine=183), own(machine=62)),
    "com-ext-broken": (HERE, own(defined=()), own()),
    "com-ext-load": (
        HERE,
        {
            "tools": {
                "torch": answers(
                    dict(TORCH_OK), dict(OPS_OK, libraries={"cpu": {"reason": "cannot be loaded", "ops": []}})
                )
            }
        },
        {},
    ),
}
