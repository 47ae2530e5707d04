from ... import native
from ...ops import registry
from . import takes

op = registry["concat_and_cache_mla"]
kernel = native.kernel(op)


def unsupported(ckv, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(ckv=ckv)


def run(ckv, kpe, ckv_cache, kpe_cache, slot_mapping, kv_format, k_scale, k_scale_cache):
    kernel(ckv, kpe, ckv_cache, kpe_cache, slot_mapping, kv_format, k_scale, takes.scale_bytes(k_scale_cache))
