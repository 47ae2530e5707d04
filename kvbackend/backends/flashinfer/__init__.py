"""FlashInfer on NVIDIA GPUs of compute capability 8.0 and later: paged attention, MLA, merging.

Decoding goes through functions that take lengths on the device. Longer queries go through FlashInfer's wrappers, which
plan on the host: one wait for the device in each call, and no capture in a graph. What has been proved, and that
nothing has run on a GPU yet, stands in docs/cuda.md.
"""

from __future__ import annotations

from collections.abc import Iterator

DEVICE = "cuda"
ORDER = 120


def missing() -> Iterator[str]:
    """Why FlashInfer cannot be used in this process."""
    from .vendor import PACKAGE

    yield from PACKAGE.missing()
