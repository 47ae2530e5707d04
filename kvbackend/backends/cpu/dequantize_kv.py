from ... import native
from ...ops import registry
from . import takes

op = registry["dequantize_kv"]
kernel = native.kernel(op)


def unsupported(**_):
    yield from native.missing(op, "cpu")


def run(codes, scales, kv_format, global_scale, role, out_dtype):
    return kernel(codes, takes.scale_bytes(scales), kv_format, global_scale, role, out_dtype)
