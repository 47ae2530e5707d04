from ... import native
from ...ops import registry
from . import takes

op = registry["candidate_blocks"]
run = native.kernel(op)


def unsupported(q, weights, key_cache, kv_format, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q, weights=weights)
    yield from takes.whole_pages("key_cache", key_cache, kv_format)
