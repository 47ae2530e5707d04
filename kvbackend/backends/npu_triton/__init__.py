"""Our own Triton kernels, in kvbackend/triton, on Ascend 950 NPUs, for what torch_npu has no fused op for.

The launchers are those of cuda_triton. Compiled for Ascend950PR_9599 and Ascend950DT_9591, not run: docs/ascend.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from ..npu import target

DEVICE = "npu"
ORDER = 500  # after torch_npu
EVIDENCE = "compiled for Ascend 950, not run"

TRITON_ASCEND = "3.2.0"  # what the kernels were compiled with

WITHOUT = dict.fromkeys(
    ("absorb_q", "lowrank_project", "lowrank_reconstruct", "project_out"), "it is one matmul, which torch has"
)


def missing() -> Iterator[str]:
    """Why no Triton kernel can run on an NPU of this process."""
    try:
        found = version("triton-ascend")
    except PackageNotFoundError:
        yield (
            f"triton-ascend is not installed; the kernels are compiled by it: pip install "
            f"triton-ascend=={TRITON_ASCEND} pybind11 in an environment without triton"
        )
    else:
        if found.partition("+")[0] != TRITON_ASCEND:
            yield (
                f"triton-ascend is {found}; the kernels were compiled with {TRITON_ASCEND}: "
                f"pip install triton-ascend=={TRITON_ASCEND}"
            )
    here = target.found()
    yield from here.reasons
    if here.target is not None and here.target.family not in target.A5:
        yield (
            f"the NPU is an Ascend{here.target.family}; the Triton kernels were compiled for Ascend950PR and "
            f"Ascend950DT: use the reference there"
        )
