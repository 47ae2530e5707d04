from ... import native
from ...ops import registry

op = registry["compact_cache"]
run = native.kernel(op)


def unsupported(**_):
    yield from native.missing(op, "cpu")
