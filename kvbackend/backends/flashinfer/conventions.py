"""FlashInfer's lse in base 2 and ours, and the workspaces that its functions want."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 128 << 20  # as its documentation recommends


def natural(lse: Tensor) -> Tensor:
    """The natural logarithm of a sum, from its logarithm in base 2."""
    return lse * math.log(2)


def base_2(lse: Tensor) -> Tensor:
    """The logarithm in base 2 of a sum, from its natural logarithm."""
    return lse / math.log(2)


def workspace(device: torch.device) -> Tensor:
    """The workspace of the current stream: zeros at first, as XQA's semaphores must be."""
    return _workspace(device, _stream(device))


def wrapper(kind: Any, device: torch.device, *options: Any) -> Any:
    """The wrapper of the current stream; it owns buffers, so one is kept for all plans."""
    return _wrapper(kind, device, _stream(device), *options)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def _wrapper(kind: Any, device: torch.device, stream: int, *options: Any) -> Any:
    return kind(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), *options)
