"""torch's linear, npu_rms_norm, npu_rotary_mul and npu_scatter_pa_kv_cache.

Not npu_kv_rmsnorm_rope_cache: it takes interleaved pairs and returns them half-split, and documents no slot -1.
"""

import torch

from . import concat_and_cache_mla, reshape_and_cache, rotary
from .vendor_ops import RMS_NORM, ROTARY_MUL


def unsupported(hidden, cos_sin, ckv_cache, kpe_cache, **_):
    yield from RMS_NORM.missing()
    yield from ROTARY_MUL.missing()
    yield from RMS_NORM.refuse("dtype", hidden.dtype, "hidden is", "convert the model")
    yield from ROTARY_MUL.refuse("rotary_dim", cos_sin.shape[1], "cos_sin's dims are", "use the reference")
    if ckv_cache is not None:
        yield from concat_and_cache_mla.unsupported(hidden, ckv_cache, kpe_cache, "auto")


def run(
    hidden, w_kva, norm_weight, cos_sin, positions, eps, interleaved, ckv_cache, kpe_cache, slot_mapping
):  # fmt: skip
    import torch_npu

    rank = norm_weight.shape[0]
    projected = torch.nn.functional.linear(hidden, w_kva)  # [T, rank + rope]
    latent, rope = projected.split((rank, cos_sin.shape[1]), -1)
    ckv = latent.contiguous()
    if hidden.shape[0]:
        ckv, _ = torch_npu.npu_rms_norm(ckv, norm_weight.contiguous(), eps)
    kpe = rotary.turn(rope[:, None], positions, cos_sin, interleaved)[:, 0].contiguous()
    if ckv_cache is not None:
        reshape_and_cache.write(
            ckv[:, None], kpe[:, None], ckv_cache[:, :, None], kpe_cache[:, :, None], slot_mapping
        )  # fmt: skip
    return ckv, kpe
