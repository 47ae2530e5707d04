from ... import native
from ...ops import registry
from . import takes

op = registry["page_logits"]
run = native.kernel(op)
REFUSES = True


def unsupported(q, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q)
