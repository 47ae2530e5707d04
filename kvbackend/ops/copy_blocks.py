"""Copy blocks within a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Index, Rows
from ..spec import op
from . import _checks
from ._math import write_blocks
from ._samples import MlaPool, Pool


@op(group="paged cache", mutates=("cache",), exact=True)
def copy_blocks(cache: Rows[Tensor, "nb *page"], block_mapping: Index[Tensor, "n 2"]) -> None:
    """Copy whole blocks to other blocks of the same pool, byte for byte: copy-on-write of shared blocks.

    cache           [nb, *page] of any dtype, written in place; any strides
    block_mapping   [n, 2] pairs (source, target), on the cache's device; a pair with a -1 is skipped

    Undefined: a block that is both source and target, or target twice; on accelerators, a block outside the pool (the
    CPU kernel skips the pair).
    Source: copy-on-write in vLLM (arXiv 2309.06180, section 4.4).
    """
    write_blocks(cache, block_mapping[:, 1], cache, block_mapping[:, 0])


@copy_blocks.values
def _(cache, block_mapping, **_):
    _checks.block_pairs(block_mapping, cache.shape[0], cache.shape[0], one_pool=True)


@copy_blocks.fake
def _(**_):
    return None


@copy_blocks.samples
def _(device, dtype):
    def call(
        pool: Pool | MlaPool, pairs: list[list[int]], part: int = 0, index: torch.dtype = torch.int64
    ) -> dict[str, Any]:
        cache = pool.caches()[part]
        for source, _ in pairs:
            if source >= 0:
                cache[source] = pool.randn(*cache.shape[1:])
        return dict(cache=cache, block_mapping=pool.ints(pairs, index).reshape(len(pairs), 2))

    for name, pool in Pool.variants(device, dtype):
        yield f"keys, {name}", call(pool, [[1, 0]])
        yield f"values, {name}", call(pool, [[0, 2]], part=1)
    for name, mla in MlaPool.variants(device, dtype):
        yield f"latent, {name}", call(mla, [[0, 2]])
        yield f"rotary, {name}", call(mla, [[1, 0]], part=1)
    small = Pool(device, dtype)
    yield "one source, many targets", call(small, [[3, 0], [3, 6], [3, 1]])
    yield "int32 pairs", call(small, [[2, 4], [1, 5]], index=torch.int32)
    yield "padding", call(small, [[-1, 3], [2, 4], [5, -1], [-1, -1]])
    yield "all padding", call(small, [[-1, -1], [-1, 0]])
    yield "empty", call(small, [])
    yield "no blocks", call(Pool(device, dtype, num_blocks=0), [[-1, -1]])
    transposed = call(small, [[0, 1], [2, 3]])
    yield "transposed pairs", {**transposed, "block_mapping": transposed["block_mapping"].T.contiguous().T}
    yield "one number per block", dict(cache=small.randn(4), block_mapping=small.ints([[0, 1]]))
    codes = torch.arange(5 * 37, dtype=torch.int32).to(torch.uint8).reshape(5, 37).to(device)
    yield "byte records", dict(cache=codes, block_mapping=small.ints([[0, 4], [1, 2]]))
