from ...ops import _formats
from . import launching, rows


def unsupported(key, **_):
    yield from launching.floats(key=key)


def run(
    key, value, key_cache, value_cache, slot_mapping, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache
):  # fmt: skip
    keys, values = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    rows.write(keys, slot_mapping, key)
    rows.write(values, slot_mapping, value)
