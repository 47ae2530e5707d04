"""Pages as boxes of three dims: what triton/copy_blocks.py copies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import launching

BLOCK = 1024
DIMS = 3


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """A shape and the strides of several tensors with as few dims as describe the same elements."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(shape):
        here = [stride[dim] for stride in strides]
        if size == 1:
            continue
        if sizes and all(step[-1] == size * stride for step, stride in zip(steps, here, strict=True)):
            sizes[-1] *= size
            for step, stride in zip(steps, here, strict=True):
                step[-1] = stride
        else:
            sizes.append(size)
            for step, stride in zip(steps, here, strict=True):
                step.append(stride)
    return sizes, steps


def copy(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """target[b] = source[a] for each pair (a, b)."""
    from ...triton.copy_blocks import copy_blocks

    source, target = launching.as_integers(source), launching.as_integers(target)
    if source.numel() == 0:
        return
    sizes, (source_steps, target_steps) = collapse(source.shape[1:], source.stride()[1:], target.stride()[1:])
    if len(sizes) > DIMS:  # no pool that we know
        for index in range(source.shape[1]):
            copy(source[:, index], target[:, index], pairs)
        return
    filler = DIMS - len(sizes)
    sizes, source_steps, target_steps = [1] * filler + sizes, [0] * filler + source_steps, [0] * filler + target_steps
    page_size = sizes[0] * sizes[1] * sizes[2]
    launching.launch(
        copy_blocks, (pairs.shape[0], launching.cdiv(page_size, BLOCK)), source, target, pairs, *pairs.stride(),
        source.stride(0), target.stride(0), *source_steps, *target_steps, sizes[1], sizes[2], page_size, BLOCK=BLOCK,
    )  # fmt: skip
