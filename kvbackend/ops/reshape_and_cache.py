"""Write key and value rows into their slots of a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Float32, Index
from ..spec import op
from . import _checks
from ._math import write_rows
from ._samples import Pool


@op(group="paged cache", mutates=("key_cache", "value_cache", "k_scale_cache", "v_scale_cache"), exact=True)
def reshape_and_cache(
    key: Float[Tensor, "T Hk D"],
    value: Float[Tensor, "T Hk Dv"],
    key_cache: Float[Tensor, "nb bs Hk D"],
    value_cache: Float[Tensor, "nb bs Hk Dv"],
    slot_mapping: Index[Tensor, "<=T"],
    kv_format: str = "auto",
    k_scale: Float32[Tensor, "1|Hk"] | None = None,
    v_scale: Float32[Tensor, "1|Hk"] | None = None,
    k_scale_cache: Float32[Tensor, "nb bs Hk"] | None = None,
    v_scale_cache: Float32[Tensor, "nb bs Hk"] | None = None,
) -> None:
    """Write the key and value rows of any tokens to their slots of a paged cache.

    key, value               [T, Hk, D | Dv]; any strides
    key_cache, value_cache   [nb, bs, Hk, D | Dv], written in place; any strides, key's dtype
    slot_mapping             slot of each token, block * bs + offset; -1 skips the token. It may be shorter than key
                             (graph padding): the tokens beyond it are skipped.
    kv_format                how a cached token reads; "auto": as the cache's dtype says
    k_scale, v_scale         dequantization multipliers of a format that has them, for all heads or per head
    k_scale_cache, v_scale_cache   per-token scales of a format that has them, written beside the codes

    Undefined: two tokens with one slot; on accelerators, a slot outside the cache (the CPU kernel skips it).
    Source: the slot and block-table convention of vLLM's paged attention (arXiv 2309.06180, section 4).
    """
    num_tokens = slot_mapping.shape[0]
    write_rows(key_cache, slot_mapping, key[:num_tokens])
    write_rows(value_cache, slot_mapping, value[:num_tokens])


@reshape_and_cache.check
def _(key, value, key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache, **_):
    _checks.kv_format(kv_format, key_cache=key_cache, value_cache=value_cache)
    _checks.no_scales(
        kv_format, k_scale=k_scale, v_scale=v_scale, k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache
    )
    _checks.same_dtype("key", key, key_cache=key_cache, value=value, value_cache=value_cache)


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
