from ... import native
from ...ops import registry

op = registry["swap_blocks"]
run = native.kernel(op)


def unsupported(**_):
    yield from native.missing(op, "cpu")
