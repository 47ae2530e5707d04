from ... import native
from ...ops import registry

op = registry["gather_cache"]
run = native.kernel(op)


def unsupported(**_):
    yield from native.missing(op, "cpu")
