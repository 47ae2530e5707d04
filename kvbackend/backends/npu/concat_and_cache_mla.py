"""torch_npu.npu_scatter_pa_kv_cache: the latent as key and the rotary part as value of one head."""

from . import takes
from .reshape_and_cache import write
from .vendor_ops import SCATTER_PA_KV_CACHE as VENDOR


def unsupported(ckv, ckv_cache, kpe_cache, kv_format, **_):
    yield from VENDOR.missing()
    yield from takes.plain_formats(VENDOR, kv_format)
    yield from VENDOR.refuse("dtype", ckv.dtype, "ckv is", "convert it, and allocate the caches alike")
    yield from takes.dense(ckv_cache=ckv_cache, kpe_cache=kpe_cache)


def run(ckv, kpe, ckv_cache, kpe_cache, slot_mapping, kv_format, k_scale, k_scale_cache):
    write(ckv[:, None], kpe[:, None], ckv_cache[:, :, None], kpe_cache[:, :, None], slot_mapping)
