from ... import native
from ...ops import registry
from . import takes

op = registry["sparse_mla_attention"]
run = native.kernel(op)


def unsupported(q_nope, ckv_cache, kv_format, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q_nope=q_nope)
    yield from takes.whole_pages("ckv_cache", ckv_cache, kv_format)
    if kv_format == "v32_nvfp4_352":
        yield f"kv_format is {kv_format!r}; the CPU kernel reads v32_fp8_656 and v32_fp8_656_ascend: choose one"
