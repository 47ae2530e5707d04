from ... import native
from ...ops import registry
from . import takes

op = registry["paged_attention"]
run = native.kernel(op)


def unsupported(q, sinks, rope_cos_sin, kv_format, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q)
    yield from takes.plain_formats(kv_format)
    if sinks is not None:
        yield from takes.floats(sinks=sinks)
    yield from takes.rope_table(rope_cos_sin, q)
