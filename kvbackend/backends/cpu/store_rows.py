"""csrc/cpu/store_rows.cpp."""

from ... import native
from ...ops import registry
from . import takes

op = registry["store_rows"]
run = native.kernel(op)
REFUSES = True


def unsupported(rows, cache, kv_format, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(rows=rows)
    if kv_format != "auto" and cache.stride(1) != 1:
        yield f"cache has bytes {cache.stride(1)} apart; the CPU kernel takes dense pages: make it contiguous"
