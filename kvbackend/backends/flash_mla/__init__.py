"""DeepSeek's FlashMLA on NVIDIA GPUs of compute capability 9.0 and 10.x: dense and sparse attention in latent space.

What has been proved, and that nothing has run on a GPU yet, stands in docs/cuda.md.
"""

from __future__ import annotations

from collections.abc import Iterator

DEVICE = "cuda"
ORDER = 100


def missing() -> Iterator[str]:
    """Why FlashMLA cannot be used in this process."""
    from .vendor import PACKAGE

    yield from PACKAGE.missing()
