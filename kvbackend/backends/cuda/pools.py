"""Pages as the copying kernels take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

DIMS = 5  # of a pool: its blocks, and as many strided ones as the kernel walks (kDims in csrc/cuda/pages.cuh)


def too_many_dims(**pools: Any) -> Iterator[str]:
    """Pools whose pages may lie in more strided dims than the kernel walks."""
    for name, pool in pools.items():
        if pool.ndim > DIMS:
            yield f"{name} has {pool.ndim} dims; the CUDA kernel copies pools of up to {DIMS}: flatten some"


def as_bits(pool: Tensor) -> Tensor:
    """The pool under a dtype that libtorch's stable ABI has a name for."""
    return pool.view(torch.uint8) if pool.element_size() == 1 else pool
