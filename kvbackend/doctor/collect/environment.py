"""Facts of the environment: values of an allow-list, names alone of the rest that concerns us."""

import re

from kvbackend.doctor import facts
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host

ALLOWED = (
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_AICPU_PATH",
    "ASCEND_CUSTOM_OPP_PATH",
    "TOOLCHAIN_HOME",
    "ATB_HOME_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_GLOBAL_LOG_LEVEL",
    "TASK_QUEUE_ENABLE",
    "PYTORCH_NPU_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "INF_NAN_MODE_ENABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TRITON_NPU_COMPILER_PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PATH",
    "PYTHONPATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "TORCH_CUDA_ARCH_LIST",
    "TRITON_PTXAS_PATH",
    "TRITON_LIBCUDA_PATH",
    "TRITON_CACHE_DIR",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "OMP_NUM_THREADS",
    "KVBACKEND_BACKEND",
    "KVBACKEND_DISABLE",
    "KVBACKEND_FALLBACK",
    "KVBACKEND_CPU_ISA",
)
_NAMED = re.compile(r"(ASCEND|HCCL|TORCH|PYTORCH|CUDA|NCCL|NVIDIA|TRITON|KVBACKEND|VLLM|ATB|OMP|MKL)_\w+")
_SECRET = re.compile(r"SECRET|TOKEN|KEY|PASS|API|AUTH|CRED", re.I)


def variables(host: Host) -> Facts:
    """One fact per allowed variable; `env.others` names further ones that are set."""
    if not host.environ_known:
        return {"env.known": facts.absent("an image has no environment")}
    found: Facts = {"env.known": facts.value(True, "environment")}
    for name in ALLOWED:
        found["env." + name] = (
            facts.value(host.environ[name], "environment") if name in host.environ else facts.absent("environment")
        )
    others = [n for n in sorted(host.environ) if n not in ALLOWED and _NAMED.fullmatch(n) and not _SECRET.search(n)]
    found["env.others"] = facts.maybe(others, "environment")
    return found
