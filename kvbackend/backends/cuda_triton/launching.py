"""How kernels are launched, and what launchers share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import nvidia
from ..npu_triton import launching as ascend

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether triton interprets kernels on CPU tensors; the variable must be set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def capability() -> tuple[int, int]:
    """The compute capability that kernels are compiled for; (0, 0) where triton-ascend compiles them for an NPU."""
    return (0, 0) if ascend.compiles() else nvidia.capability()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch on the device and current stream of the first tensor. An empty grid, which CUDA refuses, is no launch."""
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    with torch.get_device_module(device).device(device) if device.type in ("cuda", "npu") else nullcontext():
        if device.type == "npu":
            ascend.start(kernel, grid, *args, **constants)
        else:
            kernel[grid](*args, **constants)


def dot_type(dtype: torch.dtype) -> Any:
    """The dtype of a dot's operands for queries of a dtype."""
    import triton.language as tl

    if interpreted() or dtype is torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype is torch.bfloat16 else tl.float16


def keys_at_a_time(count: int, dtype: torch.dtype) -> int:
    """Keys of a step: `count`, or what bishengir-compile-a5 takes of them for queries of a dtype (`dot_block`)."""
    return max(count, 32) if ascend.compiles() and dtype is not torch.float32 else count


def floats(**tensors: Any) -> Iterator[str]:
    """The dtypes that every kernel is compiled for."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            yield f"{name} is {tensor.dtype}; the Triton kernels take float32, bfloat16 and float16: convert it"


def small_heads(**dims: Any) -> Iterator[str]:
    """The rows that a tile has room for."""
    for name, dim in dims.items():
        if dim > 256:
            yield f"{name} has rows of {dim} numbers; the Triton kernel takes up to 256: use smaller heads"


def rope_at_read(rope_cos_sin: Any) -> Iterator[str]:
    """No kernel rotates cached keys."""
    if rope_cos_sin is not None:
        yield "rope_cos_sin is given; the Triton kernel reads keys as they are stored: rotate them before caching"


def even_pairs(dim: Any, cos_sin: Any) -> Iterator[str]:
    """What `turn_pairs` needs of a table that rotates the last of some dims."""
    if cos_sin is not None and (dim - cos_sin.shape[1]) % 2:
        yield (
            f"cos_sin rotates the last {cos_sin.shape[1]} of {dim} dims; the Triton kernel turns pairs that begin at "
            f"even dims: use the reference"
        )


def as_integers(tensor: Tensor) -> Tensor:
    """The same bits as integers: what copies without a rounding."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def dot_block(dim: int) -> int:
    """Numbers of a row in a tile that dots take. Tiles of 16 bfloat16, turned for a dot, end bishengir-compile-a5 by an
    assertion."""
    return max(power_of_two(dim), 32)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` and 1."""
    return 1 << max(number - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
