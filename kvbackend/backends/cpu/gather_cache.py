from ... import native
from ...ops import registry
from . import takes

op = registry["gather_cache"]
run = native.kernel(op)


def unsupported(cache, kv_format, out_format, **_):
    yield from native.missing(op, "cpu")
    yield from takes.plain_formats(kv_format)
    if out_format != "auto":
        yield f"out_format is {out_format!r}; the CPU kernel copies rows in the cache's {cache.dtype}: pass 'auto'"
