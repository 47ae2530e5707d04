from ... import native
from ...ops import registry

op = registry["transcode"]
run = native.kernel(op)


def unsupported(pages, **_):
    yield from native.missing(op, "cpu")
    if pages.stride(1) != 1:
        yield f"pages has bytes {pages.stride(1)} apart; the CPU kernel takes dense pages: make it contiguous"
