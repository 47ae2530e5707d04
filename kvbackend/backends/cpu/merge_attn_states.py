from ... import native
from ...ops import registry
from . import takes

op = registry["merge_attn_states"]
run = native.kernel(op)
REFUSES = True


def unsupported(outs, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(outs=outs)
