"""The copies of swap_blocks within one pool. The runtime wants addresses, so the pairs are read on the host."""

from ...ops import registry
from . import own, swap_blocks

op = registry["copy_blocks"]


def unsupported(cache, **_):
    yield from own.missing(swap_blocks.op)
    yield from own.dense_pages(cache=cache)


def run(cache, block_mapping):
    import torch_npu

    if torch_npu.npu.is_current_stream_capturing():  # a graph would keep these pairs for ever
        op.reference(cache, block_mapping)
    else:
        swap_blocks.run(cache, cache, block_mapping.cpu())  # waits for the device
