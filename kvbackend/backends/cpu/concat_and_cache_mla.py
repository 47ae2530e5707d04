from ... import native
from ...ops import registry
from . import takes

op = registry["concat_and_cache_mla"]
run = native.kernel(op)


def unsupported(ckv, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(ckv=ckv)
