"""Tensors to another device with the strides, offsets and shared storages that they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ON_HOST = {"swap_blocks": ("block_mapping",)}  # op -> what it takes on the host only


def moved(args: Mapping[str, Any], device: str, on_host: tuple[str, ...] = ()) -> dict[str, Any]:
    """The arguments on a device, but for those named; views of one allocation stay views of one."""
    allocations: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in allocations or tensor.numel() == 0:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            allocations[storage.data_ptr()] = torch.empty(max(whole.numel(), 1), dtype=torch.uint8, device=device)
            if whole.numel():
                allocations[storage.data_ptr()].copy_(whole)
        whole = allocations[storage.data_ptr()]
        usable = whole.numel() // tensor.element_size() * tensor.element_size()
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return whole[:usable].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {
        name: move(value) if isinstance(value, Tensor) and name not in on_host else value
        for name, value in args.items()
    }
