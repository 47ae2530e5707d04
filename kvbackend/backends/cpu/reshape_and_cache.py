from ... import native
from ...ops import registry
from . import takes

op = registry["reshape_and_cache"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(key, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(key=key)


def run(
    key, value, key_cache, value_cache, slot_mapping, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache
):  # fmt: skip
    if kv_format == "auto" and k_scale is v_scale is k_scale_cache is v_scale_cache is None:
        kernel(key, value, key_cache, value_cache, slot_mapping)  # what the schema has itself costs no time
        return
    kernel(
        key, value, key_cache, value_cache, slot_mapping, kv_format, k_scale, v_scale,
        takes.scale_bytes(k_scale_cache), takes.scale_bytes(v_scale_cache),
    )  # fmt: skip
