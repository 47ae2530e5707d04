"""Write key and value rows into their slots of a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float, Float32, Index, Rows
from ..spec import op
from . import _checks, _formats
from ._samples import Pool


@op(group="paged cache", mutates=("key_cache", "value_cache", "k_scale_cache", "v_scale_cache"), exact=True)
def reshape_and_cache(
    key: Float[Tensor, "T Hk D"],
    value: Float[Tensor, "T Hk Dv"],
    key_cache: Rows[Tensor, "nb bs Hk key_width"],
    value_cache: Rows[Tensor, "nb bs Hk value_width"],
    slot_mapping: Index[Tensor, "<=T"],
    kv_format: str = "auto",
    k_scale: Float32[Tensor, "*k_scale"] | None = None,
    v_scale: Float32[Tensor, "*v_scale"] | None = None,
    k_scale_cache: Rows[Tensor, "nb bs *k_scales"] | None = None,
    v_scale_cache: Rows[Tensor, "nb bs *v_scales"] | None = None,
) -> None:
    """Write the key and value rows of any tokens to their slots of a paged cache.

    key, value               [T, Hk, D | Dv]; any strides
    key_cache, value_cache   [nb, bs, Hk, width], written in place; any strides. Without a quantized format width is D
                             or Dv and the dtype is key's; a quantized one stores codes, 4-bit ones two in a byte
    slot_mapping             slot of each token, block * bs + offset; -1 skips the token. It may be shorter than key
                             (graph padding): the tokens beyond it are skipped.
    kv_format                how a cached token reads: "auto", as the cache's dtype says, or a name of
                             `kvbackend.formats`; "int8/fp8_e4m3" names one for keys and one for values
    k_scale, v_scale         dequantization multipliers that the format has per tensor [1], head [Hk] or channel
                             [Hk, D]; the global scale [1] of nvfp4
    k_scale_cache, v_scale_cache   [nb, bs, Hk] or [nb, bs, Hk, D / group], written beside the codes: the scales of a
                             format that has them per token and head, or per group of channels

    Codes and scales are exact to the bit, those of `quantize_kv`; what becomes of NaN and inf stands there.
    Undefined: two tokens with one slot; on accelerators, a slot outside the cache (the CPU kernel skips it).
    Source: the slot and block-table convention of vLLM's paged attention (arXiv 2309.06180, section 4).
    """
    num_tokens = slot_mapping.shape[0]
    keys, values = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    keys.write(slot_mapping, key[:num_tokens])
    values.write(slot_mapping, value[:num_tokens])


@reshape_and_cache.check
def _(key, value, key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache, **_):
    keys, values = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    _checks.same_dtype("key", key, value=value)
    keys.check("key", key, key.shape[2], writes=True)
    values.check("value", value, value.shape[2], writes=True)


@reshape_and_cache.values
def _(key_cache, slot_mapping, **_):
    _checks.slots_within("slot_mapping", slot_mapping, key_cache)


@reshape_and_cache.fake
def _(**_):
    return None


@reshape_and_cache.samples
def _(device, dtype):
    def call(pool: Pool, num_tokens: int, **other: Any) -> dict[str, Any]:
        key, value = pool.rows(num_tokens)
        key_cache, value_cache = pool.caches()
        arguments = dict(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
        return {**arguments, "slot_mapping": pool.slots(num_tokens), **other}

    for name, pool in Pool.variants(device, dtype):
        yield name, call(pool, 13)
    small = Pool(device, dtype)
    yield "decode", call(small, 1)
    yield "empty", call(small, 0)
    yield "no blocks", call(Pool(device, dtype, num_blocks=0), 0)
    yield "padding", call(small, 3, slot_mapping=small.ints([-1, 3, -1], torch.int64))
    yield "all padding", call(small, 2, slot_mapping=small.ints([-1, -1]))
    yield "fewer slots than tokens", call(small, 8, slot_mapping=small.slots(5))
    yield "int32 slots", call(small, 3, slot_mapping=small.ints([4, -1, 11]))
    yield "last slot", call(small, 1, slot_mapping=small.ints([small.num_blocks * small.block_size - 1]))
    wide = small.randn(5, small.kv_heads, 3 * small.head_dim)
    yield "sliced rows", call(small, 5, key=wide[..., : small.head_dim], value=wide[..., -small.value_dim :])
    row = small.randn(1, small.kv_heads, small.head_dim)
    yield "expanded rows", call(small, 4, key=row.expand(4, -1, -1))
    yield "transposed rows", call(small, 4, key=small.randn(small.kv_heads, 4, small.head_dim).transpose(0, 1))

    def coded(pool: Pool, kv_format: str, num_tokens: int, **other: Any) -> dict[str, Any]:
        arguments = call(pool, num_tokens, kv_format=kv_format, **other)
        key_format, value_format = formats.pair(kv_format)
        for name, fmt, dim in (("key", key_format, pool.head_dim), ("value", value_format, pool.value_dim)):
            if formats.get(fmt).quantized:
                shape = pool.num_blocks, pool.block_size, pool.kv_heads, dim
                for kind, tensor in pool.codes(fmt, shape, name, pool.layout).items():
                    arguments[f"{name}_cache" if kind == "cache" else f"{name[0]}_{kind}"] = tensor
        return arguments

    plain = formats.of_dtype(str(dtype)).name
    for kv_format in (
        "int8", "fp8_e4m3", "fp8_e5m2:head/fp8_e4m3:channel", "mxfp8/mxfp4", "nvfp4/fp4_e2m1", "fp8_e4m3:32/int4",
        f"fp8_e4m3:token_head/{plain}", f"{plain}/fp4_e2m1:tensor",
    ):  # fmt: skip
        mixed = Pool(device, dtype, head_dim=64, value_dim=32)
        yield kv_format, coded(mixed, kv_format, 13, slot_mapping=torch.cat((mixed.slots(10), mixed.ints([-1]))))
        yield (
            f"{kv_format}, HND cache",
            coded(Pool(device, dtype, head_dim=32, value_dim=64, layout="HND"), kv_format, 5),
        )
    odd = Pool(device, dtype, kv_heads=3, head_dim=7, value_dim=10)
    yield "codes, odd dims", coded(odd, "int8/fp4_e2m1:channel", 5)
    yield "codes, no tokens", coded(odd, "fp8_e5m2/fp8_e4m3", 0)
    yield "codes, sliced rows", coded(odd, "fp8_e4m3/int8", 4, key=odd.randn(4, 3, 14)[..., ::2])
    large = Pool(device, dtype, num_blocks=12, block_size=16, kv_heads=8, head_dim=128, value_dim=128)
    yield "codes, production", coded(large, "fp8_e4m3:token_head", 13)
