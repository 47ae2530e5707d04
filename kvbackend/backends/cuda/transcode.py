from ... import native
from ...ops import registry

op = registry["transcode"]
run = native.kernel(op)


def unsupported(pages, **_):
    yield from native.missing(op, "cuda")
    if pages.stride(1) != 1:
        yield f"pages has bytes {pages.stride(1)} apart; the CUDA kernel takes dense pages: make it contiguous"
    if not pages.is_aligned(16):
        yield "pages starts at an odd address; the CUDA kernel moves 16 bytes at a time: copy it"
