from ... import native
from ...ops import registry
from . import takes

op = registry["mla_attention"]
run = native.kernel(op)


def unsupported(q_nope, kv_format, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q_nope=q_nope)
    yield from takes.plain_formats(kv_format)
