from ... import native
from ...ops import registry
from . import takes

op = registry["apply_rope"]
run = native.kernel(op)
REFUSES = True


def unsupported(x, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(x=x)
