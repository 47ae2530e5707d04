"""torch_npu.npu_scatter_pa_kv_cache, its cache in plain order ("Norm")."""

from . import takes
from .vendor_ops import SCATTER_PA_KV_CACHE as VENDOR


def unsupported(key, key_cache, value_cache, kv_format, **_):
    yield from VENDOR.missing()
    yield from takes.plain_formats(VENDOR, kv_format)
    yield from VENDOR.refuse("dtype", key.dtype, "key is", "convert it, and allocate the caches alike")
    yield from takes.dense(key_cache=key_cache, value_cache=value_cache)


def run(
    key, value, key_cache, value_cache, slot_mapping, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache
):  # fmt: skip
    write(key, value, key_cache, value_cache, slot_mapping)


def write(key, value, key_cache, value_cache, slot_mapping):
    """Rows [T, N, D | Dv] to the slots of caches [nb, bs, N, D | Dv]; tokens beyond the slots are skipped."""
    import torch_npu

    num_tokens = slot_mapping.shape[0]
    if num_tokens and key_cache.numel():
        torch_npu.npu_scatter_pa_kv_cache(
            key[:num_tokens].contiguous(),  # rows and slots as views are rejected: vllm-ascend PR #11713
            value[:num_tokens].contiguous(),
            key_cache,
            value_cache,
            slot_mapping.contiguous(),
            cache_mode="Norm",  # the default is fractal NZ pages
        )
