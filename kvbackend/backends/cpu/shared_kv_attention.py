"""csrc/cpu/shared_kv_attention.cpp."""

from ... import native
from ...ops import registry
from . import takes

op = registry["shared_kv_attention"]
run = native.kernel(op)


def unsupported(q, window_cache, compressed_cache, window_format, kv_format, sinks, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q)
    if sinks is not None:
        yield from takes.floats(sinks=sinks)
    for name, pages, record in (
        ("window_cache", window_cache, window_format),
        ("compressed_cache", compressed_cache, kv_format),
    ):
        if pages is not None and record != "auto" and pages.stride(1) != 1:
            yield f"{name} has bytes {pages.stride(1)} apart; the CPU kernel takes dense pages: make it contiguous"
