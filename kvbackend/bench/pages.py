"""Pools in memory and batches over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layouts import empty_pages
from ..ops._samples import Maker

ROTATIONS = 64  # block tables at most


def filled(num_blocks: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Blocks that repeat a few random ones: drawing them all would take longer than the benchmark."""
    few = torch.randn(min(64, num_blocks), *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    pages = empty_pages(num_blocks, *shape, dtype=dtype, device="cpu")
    for start in range(0, num_blocks, len(few)):
        part = pages[start : start + len(few)]
        part.copy_(few[: len(part)])
    return pages


def batches(make: Maker, pages: Tensor, sequences: int, context: int) -> list[dict[str, Any]]:
    """Sequences of one length, one query each, in blocks of as many block tables as fill the pool."""
    num_blocks, block_size = pages.shape[:2]
    columns = -(-context // block_size)
    return [
        dict(
            block_table=torch.stack([make.permutation(num_blocks)[:columns] for _ in range(sequences)]).int(),
            seq_lens=make.ints([context] * sequences), cu_seqlens_q=make.ints(list(range(sequences + 1))),
            max_seqlen_q=1,
        )
        for _ in range(max(2, min(ROTATIONS, num_blocks // (sequences * columns))))
    ]  # fmt: skip
