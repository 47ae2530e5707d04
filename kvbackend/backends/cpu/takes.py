"""Reasons that the CPU kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def floats(**tensors: Any) -> Iterator[str]:
    """The dtypes that every kernel is built for."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            yield f"{name} is {tensor.dtype}; the CPU kernels take float32, bfloat16 and float16: convert it"


def scale_bytes(scales: Tensor | None) -> Tensor | None:
    """Scales as the kernels take them: powers of two (float8_e8m0fnu) as bytes, since libtorch's stable ABI, in which
    kernels are written, has no name for that dtype.
    """
    return scales.view(torch.uint8) if scales is not None and scales.dtype is torch.float8_e8m0fnu else scales


def rope_table(rope_cos_sin: Any, q: Any) -> Iterator[str]:
    """The dtypes of a table that turns keys as they are read."""
    if rope_cos_sin is not None and rope_cos_sin.dtype not in (torch.float32, q.dtype):
        yield (
            f"rope_cos_sin is {rope_cos_sin.dtype}; the CPU kernel takes torch.float32 or q's {q.dtype}: "
            f"convert the table once"
        )


def whole_pages(name: str, pages: Any, kv_format: str) -> Iterator[str]:
    """The bytes of a page of records follow each other."""
    if kv_format != "auto" and pages.stride(1) != 1:
        yield f"{name} has bytes {pages.stride(1)} apart; the CPU kernel takes whole pages: make it contiguous"
