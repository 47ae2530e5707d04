"""Our own compiled kernels for NVIDIA GPUs, in csrc/cuda: copies of blocks, and records in another order.

What has been proved, and that nothing has run on a GPU yet, stands in docs/cuda.md.
"""

from collections.abc import Iterator

from ... import native

DEVICE = "cuda"
ORDER = 300
EVIDENCE = "compiled for sm_80 to sm_120 by nvcc, not run"


def missing() -> Iterator[str]:
    """Why no compiled kernel can run in this process."""
    if reason := native.library(DEVICE).reason:
        yield reason
