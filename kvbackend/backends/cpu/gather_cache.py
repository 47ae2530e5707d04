from ... import formats, native
from ...ops import registry
from . import takes

op = registry["gather_cache"]
kernel = native.kernel(op)
REFUSES = True


def unsupported(cache, kv_format, out_format, **_):
    yield from native.missing(op, "cpu")
    quantized = kv_format != "auto" and formats.get(kv_format).quantized
    if out_format != "auto" and not quantized:
        yield f"out_format is {out_format!r}; the CPU kernel copies rows in the cache's {cache.dtype}: pass 'auto'"
    if quantized and cache.ndim not in (3, 4):
        yield f"cache has {cache.ndim} dims; the CPU kernel reads codes of caches with 3, or 4 with heads: reshape it"


def run(cache, block_table, cu_seqlens, num_tokens, seq_starts, kv_format, scale, scale_cache, out_format):
    return kernel(
        cache, block_table, cu_seqlens, num_tokens, seq_starts, kv_format, scale, takes.scale_bytes(scale_cache),
        out_format,
    )  # fmt: skip
