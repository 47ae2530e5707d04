from ... import native
from ...ops import registry
from . import takes

op = registry["reshape_and_cache"]
run = native.kernel(op)


def unsupported(key, kv_format, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(key=key)
    yield from takes.plain_formats(kv_format)
