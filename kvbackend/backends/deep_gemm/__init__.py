"""DeepSeek's DeepGEMM on NVIDIA GPUs of compute capability 9.0 and 10.x: the indexer's scores from fp8 codes.

What has been proved, and that nothing has run on a GPU yet, stands in docs/cuda.md.
"""

from __future__ import annotations

from collections.abc import Iterator

DEVICE = "cuda"
ORDER = 110
WITHOUT = {"lightning_indexer": "DeepGEMM selects nothing; call indexer_logits, then topk_indices"}


def missing() -> Iterator[str]:
    """Why DeepGEMM cannot be used in this process."""
    from .vendor import PACKAGE

    yield from PACKAGE.missing()
