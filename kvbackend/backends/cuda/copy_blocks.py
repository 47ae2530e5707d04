from ... import native
from ...ops import registry
from . import pools

op = registry["copy_blocks"]
kernel = native.kernel(op)


def unsupported(cache, **_):
    yield from native.missing(op, "cuda")
    yield from pools.too_many_dims(cache=cache)


def run(cache, block_mapping):
    kernel(pools.as_bits(cache), block_mapping)
