"""csrc/cpu/quantize_kv.cpp; formats without codes are torch's conversion."""

from ... import formats, native
from ...codecs import split
from ...ops import registry
from . import takes

op = registry["quantize_kv"]
kernel = native.kernel(op)


def unsupported(x, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(x=x)


def run(x, kv_format, scale, global_scale, role):
    fmt = formats.get(kv_format)
    if not fmt.quantized:
        return split.encode(x, fmt)
    codes, scales = kernel(x, kv_format, scale, global_scale, role)
    return codes, scales.view(split.scale_dtype(fmt))
