from ... import native
from ...ops import registry

op = registry["copy_blocks"]
run = native.kernel(op)
REFUSES = True


def unsupported(**_):
    yield from native.missing(op, "cpu")
