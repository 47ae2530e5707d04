"""cudaMemcpyBatchAsync to and from the host, one kernel on one GPU: csrc/cuda/swap_blocks.cu."""

from ... import native
from ...ops import registry
from . import pools

op = registry["swap_blocks"]
kernel = native.kernel(op)


def unsupported(source, target, **_):
    yield from native.missing(op, "cuda")
    yield from pools.too_many_dims(source=source, target=target)


def run(source, target, block_mapping):
    kernel(pools.as_bits(source), pools.as_bits(target), block_mapping)
