"""torch_npu.npu_gather_pa_kv_cache, which reads two caches: the second one is 32 bytes a token of scratch."""

from ...ops import _math
from . import takes
from .vendor_ops import GATHER_PA_KV_CACHE as VENDOR

SCRATCH_BYTES = 32  # the smallest unit that the kernel copies


def unsupported(cache, seq_starts, kv_format, out_format, **_):
    yield from VENDOR.missing()
    yield from takes.plain_formats(VENDOR, kv_format)
    yield from VENDOR.refuse("dtype", cache.dtype, "cache is", "allocate it in one of these")
    yield from takes.dense(cache=cache)
    if out_format != "auto":
        yield f"out_format is {out_format!r}; {VENDOR.name} copies rows in the cache's {cache.dtype}: pass 'auto'"
    if seq_starts is not None:
        yield (
            "seq_starts is given; npu_gather_pa_kv_cache's seq_offset counts in whole blocks (op-plugin, "
            "test_npu_gather_pa_kv_cache.py): gather whole sequences"
        )
    token_bytes = cache.element_size()
    for size in cache.shape[2:]:
        token_bytes *= size
    yield from VENDOR.refuse("token_bytes", token_bytes, "the bytes of a token are", "gather fewer heads at a time")


def run(cache, block_table, cu_seqlens, num_tokens, seq_starts, kv_format, scale, scale_cache, out_format):
    import torch_npu

    num_blocks, block_size, *row = cache.shape
    out = cache.new_zeros(num_tokens, *row)
    if 0 in (num_tokens, cache.numel(), *block_table.shape):
        return out
    width = SCRATCH_BYTES // cache.element_size()
    as_heads = cache.flatten(2) if row else cache[..., None]
    torch_npu.npu_gather_pa_kv_cache(
        as_heads[:, :, None],  # [nb, bs, 1, bytes of a row]
        cache.new_empty(num_blocks, block_size, 1, width),
        block_table.clamp(min=0).int(),
        cu_seqlens,
        out.view(num_tokens, 1, -1),
        cache.new_empty(num_tokens, 1, width),
        is_seq_lens_cumsum=True,
    )
    slots = _math.gather_slots(block_table, cu_seqlens, num_tokens, None, block_size)
    return out.masked_fill_(_math.expand(slots < 0, out), 0)  # rows in no block, which the kernel read from block 0
