"""Reasons that several adapters share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import formats
from .limits import VendorOp


def dense(**caches: Any) -> Iterator[str]:
    """Caches must lie in memory as their shape says: the kernels compute addresses from it."""
    for name, cache in caches.items():
        if cache is not None and not cache.is_contiguous():
            yield (
                f"{name} is strided; the Ascend kernels take a dense cache: allocate it on its own, keys and values in "
                f"layout 'NHD'"
            )


def without(vendor: VendorOp, **arguments: Any) -> Iterator[str]:
    """Arguments that the vendor op has no counterpart of."""
    for name, value in arguments.items():
        if value is not None:
            yield f"{name} is given; {vendor.name} has nothing of the kind ({vendor.source}): leave it out"


def plain_formats(vendor: VendorOp, kv_format: str) -> Iterator[str]:
    """The vendor op copies or reads numbers, not codes."""
    if any(side != "auto" and formats.get(side).quantized for side in formats.pair(kv_format)):
        yield f"kv_format is {kv_format!r}; {vendor.name} is called for auto, fp32, bf16 and fp16: choose one of these"
