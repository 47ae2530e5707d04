"""Write MLA's latent and rotary rows into their slots of a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Float32, Index, Rows
from ..spec import op
from . import _checks, _formats
from ._samples import MlaPool


@op(group="paged cache", mutates=("ckv_cache", "kpe_cache", "k_scale_cache"), exact=True)
def concat_and_cache_mla(
    ckv: Float[Tensor, "T kv_lora_rank"],
    kpe: Float[Tensor, "T qk_rope_head_dim"],
    ckv_cache: Rows[Tensor, "nb bs latent_width"],
    kpe_cache: Float[Tensor, "nb bs qk_rope_head_dim"],
    slot_mapping: Index[Tensor, "<=T"],
    kv_format: str = "auto",
    k_scale: Float32[Tensor, "1"] | None = None,
    k_scale_cache: Rows[Tensor, "nb bs *k_scales"] | None = None,
) -> None:
    """Write the latent and rotary rows of any tokens to their slots of a paged MLA cache.

    ckv                    [T, kv_lora_rank], normalized: it is key and value of every head; any strides
    kpe                    [T, qk_rope_head_dim], rotated: the key part that all heads share; any strides
    ckv_cache, kpe_cache   [nb, bs, kv_lora_rank | qk_rope_head_dim], written in place, ckv's dtype; any strides: most
                           engines keep both as slices of one [nb, bs, kv_lora_rank + qk_rope_head_dim] tensor
    slot_mapping           slot of each token, block * bs + offset; -1 skips the token. It may be shorter than ckv
                           (graph padding): the tokens beyond it are skipped.
    kv_format              how a cached token reads: "auto", as the dtype says, or a name of `kvbackend.formats`.
                           A quantized one is the latent's; the rotary part, small and sensitive, stays in kpe's dtype
    k_scale                [1], dequantization multiplier of a format that has one per tensor; nvfp4's global scale
    k_scale_cache          [nb, bs], or [nb, bs, kv_lora_rank / group], written beside the codes: the scales of a
                           format that has them per token, or per group of channels

    Undefined: two tokens with one slot; on accelerators, a slot outside the cache (the CPU kernel skips it).
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; slots as in vLLM (arXiv 2309.06180, section 4).
    """
    num_tokens = slot_mapping.shape[0]
    latents, rotary = _formats.latent(kv_format, ckv_cache, kpe_cache, k_scale, k_scale_cache)
    latents.write(slot_mapping, ckv[:num_tokens])
    rotary.write(slot_mapping, kpe[:num_tokens])


@concat_and_cache_mla.check
def _(ckv, kpe, ckv_cache, kpe_cache, kv_format, k_scale, k_scale_cache, **_):
    _checks.same_dtype("ckv", ckv, kpe=kpe)
    latents, rotary = _formats.latent(kv_format, ckv_cache, kpe_cache, k_scale, k_scale_cache)
    latents.check("ckv", ckv, ckv.shape[1], writes=True)
    rotary.check("kpe", kpe)


@concat_and_cache_mla.values
def _(ckv_cache, slot_mapping, **_):
    _checks.slots_within("slot_mapping", slot_mapping, ckv_cache)


@concat_and_cache_mla.fake
def _(**_):
    return None


@concat_and_cache_mla.samples
def _(device, dtype):
    def call(pool: MlaPool, num_tokens: int, **other: Any) -> dict[str, Any]:
        ckv, kpe = pool.rows(num_tokens)
        ckv_cache, kpe_cache = pool.caches()
        arguments = dict(ckv=ckv, kpe=kpe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        return {**arguments, "slot_mapping": pool.slots(num_tokens), **other}

    for name, pool in MlaPool.variants(device, dtype):
        yield name, call(pool, 13)
    small = MlaPool(device, dtype)
    rank, rope = small.kv_lora_rank, small.qk_rope_head_dim
    yield "decode", call(small, 1)
    yield "empty", call(small, 0)
    yield "no blocks", call(MlaPool(device, dtype, num_blocks=0), 2, slot_mapping=small.ints([-1, -1]))
    yield "padding", call(small, 3, slot_mapping=small.ints([-1, 3, -1], torch.int64))
    yield "all padding", call(small, 2, slot_mapping=small.ints([-1, -1]))
    yield "fewer slots than tokens", call(small, 8, slot_mapping=small.slots(5))
    yield "int32 slots", call(small, 3, slot_mapping=small.ints([4, -1, 11]))
    yield "last slot", call(small, 1, slot_mapping=small.ints([small.num_blocks * small.block_size - 1]))
    projected = small.randn(5, rank + rope)
    yield "sliced rows", call(small, 5, ckv=projected[:, :rank], kpe=projected[:, rank:])
    yield (
        "expanded rows",
        call(small, 4, ckv=small.randn(1, rank).expand(4, -1), kpe=small.randn(1, rope).expand(4, -1)),
    )
    yield "transposed rows", call(small, 4, ckv=small.randn(rank, 4).T, kpe=small.randn(rope, 4).T)
    wide = MlaPool(device, dtype, kv_lora_rank=64)
    for kv_format in ("fp8_e4m3:token_head", "fp8_e4m3", "fp8_e5m2:head", "fp4_e2m1", "nvfp4", "mxfp8", "int8"):
        codes = wide.codes(kv_format, (wide.num_blocks, wide.block_size, 64))
        scales = dict(k_scale=codes["scale"], k_scale_cache=codes["scale_cache"])
        slots = torch.cat((wide.slots(8), wide.ints([-1])))
        yield kv_format, call(wide, 13, kv_format=kv_format, ckv_cache=codes["cache"], slot_mapping=slots, **scales)
