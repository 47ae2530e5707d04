"""csrc/cpu/compress_kv.cpp."""

from ... import native
from ...ops import registry
from . import takes

op = registry["compress_kv"]
run = native.kernel(op)
REFUSES = True


def unsupported(kv, norm_weight, position_bias, state, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(kv=kv, norm_weight=norm_weight)
    if position_bias is not None:
        yield from takes.floats(position_bias=position_bias)
    if state is not None and state.stride(2) != 1:
        yield "state is strided in its last dim; the CPU kernel takes one that is dense there: allocate it so"
