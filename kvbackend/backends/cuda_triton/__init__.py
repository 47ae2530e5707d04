"""Our own Triton kernels, in kvbackend/triton, on NVIDIA GPUs from compute capability 8.0 on."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from .resources import MOST

DEVICE = "cuda"
ORDER = 500  # after whatever a vendor's library does better
EVIDENCE = "interpreted, compiled for sm_80 to sm_120, not run"
EVIDENCE_OF = {
    op: f"interpreted, compiled for sm_80 to sm_120 ({registers} registers, {kib} KiB shared, no spills), not run"
    for op, (registers, kib) in MOST.items()
} | dict.fromkeys(("absorb_q", "project_out", "lowrank_project", "lowrank_reconstruct"), "torch's matmul, not run")

OLDEST_TRITON = (3, 2)


def missing() -> Iterator[str]:
    """Why no Triton kernel can run on a GPU of this machine."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        yield "triton is not installed; the CUDA kernels are compiled by it: pip install triton"
    else:
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TRITON:
            oldest = ".".join(map(str, OLDEST_TRITON))
            yield f"triton is {found}; the kernels use what {oldest} has: pip install 'triton>={oldest}'"
    if not torch.cuda.is_available():
        yield "torch finds no CUDA device; the kernels run on one: install a CUDA build of torch and the driver"
        return
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        yield (
            f"the CUDA device has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0, for "
            f"bfloat16: use a GPU of the Ampere generation or later"
        )
