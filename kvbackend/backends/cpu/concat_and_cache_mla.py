from ... import native
from ...ops import registry
from . import takes

op = registry["concat_and_cache_mla"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(ckv, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(ckv=ckv)


def run(ckv, kpe, ckv_cache, kpe_cache, slot_mapping, kv_format, k_scale, k_scale_cache):
    if kv_format == "auto" and k_scale is k_scale_cache is None:  # what the schema has itself costs no time
        kernel(ckv, kpe, ckv_cache, kpe_cache, slot_mapping)
        return
    kernel(ckv, kpe, ckv_cache, kpe_cache, slot_mapping, kv_format, k_scale, takes.scale_bytes(k_scale_cache))
