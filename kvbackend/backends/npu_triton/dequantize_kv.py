from ...codecs import split
from ...formats import get
from ..cuda_triton import dequantize_kv as launcher
from . import limits

run = launcher.run


def unsupported(codes, kv_format, **rest):
    yield from launcher.unsupported(codes=codes, kv_format=kv_format, **rest)
    yield from limits.widths(codes=codes.shape[2] * split.per_byte(get(kv_format)))
