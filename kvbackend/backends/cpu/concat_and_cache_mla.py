from ... import native
from ...ops import registry
from . import takes

op = registry["concat_and_cache_mla"]
run = native.kernel(op)


def unsupported(ckv, kv_format, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(ckv=ckv)
    yield from takes.plain_formats(kv_format)
