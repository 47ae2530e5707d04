from ... import native
from ...ops import registry
from . import takes

op = registry["swap_blocks"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(**_):
    yield from native.missing(op, "cpu")


def run(source, target, block_mapping):
    kernel(takes.scale_bytes(source), takes.scale_bytes(target), block_mapping)
