"""Reasons that the CPU kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def floats(**tensors: Any) -> Iterator[str]:
    """The dtypes that every kernel is built for."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            yield f"{name} is {tensor.dtype}; the CPU kernels take float32, bfloat16 and float16: convert it"
