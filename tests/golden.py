"""The generator behind the golden numbers in the tests: reproducible without random numbers, in any language."""

from __future__ import annotations

import math

import torch


def wave(seed: float, *shape: int) -> torch.Tensor:
    """sin(seed + 0.73 i) for i = 0, 1, ..., in C order, float64."""
    return torch.sin(seed + 0.73 * torch.arange(math.prod(shape), dtype=torch.float64)).reshape(shape)
