"""FlashInfer's lse in base 2 and ours, and the workspaces that its functions want."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError

WORKSPACE_BYTES = 128 << 20  # as its documentation recommends

_workspaces: dict[tuple[torch.device, int], Tensor] = {}  # by device and stream


def natural(lse: Tensor) -> Tensor:
    """The natural logarithm of a sum, from its logarithm in base 2."""
    return lse * math.log(2)


def base_2(lse: Tensor) -> Tensor:
    """The logarithm in base 2 of a sum, from its natural logarithm."""
    return lse / math.log(2)


def workspace(device: torch.device) -> Tensor:
    """The workspace of the current stream: zeros at first, as XQA's semaphores must be; kept as long as the process.

    None is made while a graph is captured, where it would be zero only at each replay, and lie in the graph's memory.
    A captured call takes the first that was made before for its device: a graph is replayed on the stream of the calls
    around it. Undefined: graphs replayed side by side.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        made = [buffer for (on, _), buffer in _workspaces.items() if on == device]
        if not made:
            raise UnsupportedError(
                f"FlashInfer was called while a graph is captured, and has no workspace on {device}; it is made by the "
                f"first call outside of a graph: call the op once before the capture"
            )
        return made[0]
    key = device, _stream(device)
    if key not in _workspaces:
        _workspaces[key] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[key]


def wrapper(kind: Any, device: torch.device, *options: Any) -> Any:
    """The wrapper of the current stream; it owns buffers, so one is kept for all plans."""
    return _wrapper(kind, device, _stream(device), *options)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@cache
def _wrapper(kind: Any, device: torch.device, stream: int, *options: Any) -> Any:
    return kind(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), *options)
