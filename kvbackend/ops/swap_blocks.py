"""Copy blocks between pools."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Index, Rows, need
from ..spec import op
from . import _checks
from ._math import write_blocks
from ._samples import Maker, MlaPool, Pool


@op(group="paged cache", mutates=("target",), any_device=("source", "target", "block_mapping"), exact=True)
def swap_blocks(
    source: Rows[Tensor, "nb_source *page"],
    target: Rows[Tensor, "nb_target *page"],
    block_mapping: Index[Tensor, "n 2"],
) -> None:
    """Copy whole blocks of one pool to blocks of another, byte for byte, between devices and host memory too.

    source          [nb_source, *page] of any dtype, on any device; any strides
    target          [nb_target, *page] of the same dtype, on any device, written in place; any strides
    block_mapping   [n, 2] pairs (block of source, block of target), on the host; a pair with a -1 is skipped

    Host memory should be pinned: a copy from or to pageable memory waits for the device. A copy may run behind the
    call, in the order of the device's current stream; whoever reuses a source block elsewhere, or reads a target on
    the host, waits for the stream first.
    Refused: pools whose memory overlaps (`copy_blocks` copies within a pool).
    Undefined: one target twice; on accelerators, a block outside its pool (the CPU kernel skips the pair).
    Source: swapping in vLLM (arXiv 2309.06180, section 4.5).
    """
    write_blocks(target, block_mapping[:, 1], source, block_mapping[:, 0])


@swap_blocks.check
def _(source, target, block_mapping, **_):
    _checks.same_dtype("source", source, target=target)
    need(
        block_mapping.device.type == "cpu",
        f"block_mapping is on {block_mapping.device}; it must be on the host, where the copies are issued: "
        f"build it there",
    )
    if not isinstance(source, Tensor):  # while tracing they are tensors without an address
        need(
            not source.overlaps(target),
            "source and target overlap in memory; they must be two pools: call copy_blocks to copy within one",
        )


@swap_blocks.values
def _(source, target, block_mapping, **_):
    _checks.block_pairs(block_mapping, source.shape[0], target.shape[0], one_pool=False)


@swap_blocks.fake
def _(**_):
    return None


@swap_blocks.samples
def _(device, dtype):
    host = torch.device("cpu")

    def filled(pool: Pool | MlaPool, part: int = 0) -> Tensor:
        cache = pool.caches()[part]
        return cache.copy_(pool.randn(*cache.shape))

    def call(
        source: Tensor, target: Tensor, pairs: list[list[int]], index: torch.dtype = torch.int64
    ) -> dict[str, Any]:
        mapping = Maker(host, dtype).ints(pairs, index).reshape(len(pairs), 2)
        return dict(source=source, target=target, block_mapping=mapping)

    for name, pool in Pool.variants(device, dtype):
        yield f"keys, {name}", call(filled(pool), pool.caches()[0], [[1, 0], [0, 2]])
    for name, mla in MlaPool.variants(device, dtype):
        yield f"rotary, {name}", call(filled(mla, 1), mla.caches()[1], [[1, 0], [0, 2]])
    small, large = Pool(device, dtype), Pool(host, dtype, num_blocks=11)
    pairs = [[3, 10], [0, 1], [6, 0]]
    yield "out to the host", call(filled(small), large.caches()[0], pairs)
    yield "in from the host", call(filled(large), small.caches()[0], [[b, a] for a, b in pairs])
    if device.type not in ("cpu", "meta"):  # elsewhere torch cannot pin
        yield "out to pinned memory", call(filled(small), large.caches()[0].pin_memory(), pairs)
        yield "in from pinned memory", call(filled(large).pin_memory(), small.caches()[0], [[b, a] for a, b in pairs])
    interleaved = Pool(device, dtype, layout="interleaved")
    yield "between layouts", call(filled(interleaved), small.caches()[0], [[2, 4], [5, 5]])
    yield "one source, many targets", call(filled(small), small.caches()[0], [[3, 0], [3, 6], [3, 3]])
    yield "int32 pairs", call(filled(small), small.caches()[0], [[2, 4], [1, 5]], torch.int32)
    yield "padding", call(filled(small), small.caches()[0], [[-1, 3], [2, 4], [5, -1], [-1, -1]])
    yield "all padding", call(filled(small), small.caches()[0], [[-1, -1]])
    yield "empty", call(filled(small), small.caches()[0], [])
    yield "empty source", call(filled(Pool(device, dtype, num_blocks=0)), small.caches()[0], [[-1, 2]])
    yield "one number per block", call(small.randn(4), small.randn(5), [[0, 4]])
    codes = torch.arange(5 * 37, dtype=torch.int32).to(torch.uint8).reshape(5, 37).to(device)
    yield "byte records", call(codes, torch.zeros_like(codes), [[0, 4], [1, 2]])
