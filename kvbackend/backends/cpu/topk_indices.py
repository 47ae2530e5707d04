from ... import native
from ...ops import registry
from . import takes

op = registry["topk_indices"]
run = native.kernel(op)
REFUSES = True


def unsupported(scores, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(scores=scores)
