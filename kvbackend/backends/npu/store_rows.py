"""torch_npu.npu_scatter_pa_cache, which writes one cache; Ascend 950 only."""

from . import takes
from .vendor_ops import SCATTER_PA_CACHE as VENDOR


def unsupported(rows, cache, kv_format, **_):
    yield from VENDOR.missing()
    if kv_format != "auto":
        yield (
            f"kv_format is {kv_format!r}; {VENDOR.name} writes rows as they are, and codes must match to the bit, "
            f"which CANN's kv_compress_epilog neither documents nor keeps for infinities (ops-transformer master "
            f"57781440): pass 'auto'"
        )
    if VENDOR.is_here():
        yield from VENDOR.refuse("dtype", rows.dtype, "rows are", "convert them, and allocate the cache alike")
    yield from takes.dense(cache=cache)


def run(rows, cache, slot_mapping, kv_format, block_size):
    import torch_npu

    num_tokens = slot_mapping.shape[0]
    if num_tokens and cache.numel():
        torch_npu.npu_scatter_pa_cache(
            rows[:num_tokens, None].contiguous(), slot_mapping.contiguous(), key_cache=cache[:, :, None]
        )
