"""Project hidden states to MLA's cached row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Index, need
from ..rope import cos_sin_table
from ..spec import op
from . import _checks
from ._math import compute_dtype, rotate_at, write_rows
from ._samples import MlaPool


@op(group="low rank", mutates=("ckv_cache", "kpe_cache"))
def mla_project_kv(
    hidden: Float[Tensor, "T hidden_size"],
    w_kva: Float[Tensor, "kva_dim hidden_size"],
    norm_weight: Float[Tensor, "kv_lora_rank"],
    cos_sin: Float[Tensor, "P qk_rope_head_dim"],
    positions: Index[Tensor, "T"],
    eps: float,
    interleaved: bool = True,
    ckv_cache: Float[Tensor, "nb bs kv_lora_rank"] | None = None,
    kpe_cache: Float[Tensor, "nb bs qk_rope_head_dim"] | None = None,
    slot_mapping: Index[Tensor, "<=T"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Project hidden states to the row that MLA caches, normalizing the latent and rotating the shared key.

    hidden        [T, hidden_size]; any strides
    w_kva         [kv_lora_rank + qk_rope_head_dim, hidden_size]: the model's kv_a_proj_with_mqa.weight
    norm_weight   [kv_lora_rank]: the model's kv_a_layernorm.weight
    cos_sin       [P, qk_rope_head_dim], as `apply_rope` takes it; float32 or hidden's dtype
    positions     [T], position of each token; -1 is no token: its kpe is not rotated
    eps           added to the mean square of the latent
    interleaved   which dims of kpe are pairs, as in `apply_rope`; DeepSeek's models interleave
    ckv_cache, kpe_cache, slot_mapping   given together or not at all: the rows are also written to their slots, as
                  `concat_and_cache_mla` does
    Returns ckv [T, kv_lora_rank], normalized, and kpe [T, qk_rope_head_dim], rotated and not normalized, in hidden's
    dtype. The reference computes in float32 and rounds once; the CPU kernel, from 9 tokens of 16 bits on, rounds the
    projection too, as torch's own linear does. w_kva, norm_weight and the caches have hidden's dtype.

    Undefined: as in `apply_rope` and `concat_and_cache_mla`.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
    """
    dtype = compute_dtype(hidden)
    projected = hidden.to(dtype) @ w_kva.to(dtype).T  # [T, kva_dim]
    latent, rotary = projected.split((norm_weight.shape[0], cos_sin.shape[1]), -1)
    mean_square = latent.square().mean(-1, keepdim=True)
    ckv = (latent * (mean_square + eps).rsqrt() * norm_weight.to(dtype)).to(hidden.dtype)
    kpe = rotate_at(rotary[:, None], positions, cos_sin, interleaved)[:, 0].to(hidden.dtype).contiguous()
    if ckv_cache is not None:
        assert kpe_cache is not None
        assert slot_mapping is not None
        num_tokens = slot_mapping.shape[0]
        write_rows(ckv_cache, slot_mapping, ckv[:num_tokens])
        write_rows(kpe_cache, slot_mapping, kpe[:num_tokens])
    return ckv, kpe


@mla_project_kv.check
def _(hidden, w_kva, norm_weight, cos_sin, ckv_cache, kpe_cache, slot_mapping, **_):
    _checks.same_dtype("hidden", hidden, w_kva=w_kva, norm_weight=norm_weight)
    _checks.rotary_table("hidden", hidden, cos_sin)
    rank, rope = norm_weight.shape[0], cos_sin.shape[1]
    need(
        w_kva.shape[0] == rank + rope,
        f"w_kva has {w_kva.shape[0]} rows; it must have {rank + rope}, the {rank} of norm_weight plus the {rope} that "
        f"cos_sin rotates: pass the whole kv_a_proj_with_mqa.weight",
    )
    written = dict(ckv_cache=ckv_cache, kpe_cache=kpe_cache, slot_mapping=slot_mapping)
    given = [name for name, tensor in written.items() if tensor is not None]
    need(
        len(given) in (0, len(written)),
        f"only {' and '.join(given)} given; {', '.join(written)} come together or not at all: pass all three or none",
    )
    if ckv_cache is not None:
        _checks.same_dtype("hidden", hidden, ckv_cache=ckv_cache, kpe_cache=kpe_cache)


@mla_project_kv.values
def _(positions, cos_sin, ckv_cache, slot_mapping, **_):
    _checks.positions_within(positions, cos_sin)
    if ckv_cache is not None:
        _checks.slots_within("slot_mapping", slot_mapping, ckv_cache)


@mla_project_kv.fake
def _(hidden, norm_weight, cos_sin, **_):
    num_tokens = hidden.shape[0]
    return hidden.new_empty(num_tokens, norm_weight.shape[0]), hidden.new_empty(num_tokens, cos_sin.shape[1])


@mla_project_kv.samples
def _(device, dtype):
    def call(
        pool: MlaPool, num_tokens: int, cached: bool = True, hidden_size: int = 20, **other: Any
    ) -> dict[str, Any]:
        rank, rope = pool.kv_lora_rank, pool.qk_rope_head_dim
        arguments = dict(
            hidden=pool.randn(num_tokens, hidden_size),
            w_kva=pool.randn(rank + rope, hidden_size, scale=hidden_size**-0.5),
            norm_weight=1 + pool.randn(rank, scale=0.1),
            cos_sin=cos_sin_table(50, rope, 1e4, device=device),
            positions=pool.ints([(7 * t) % 50 for t in range(num_tokens)], torch.int64),
            eps=1e-6,
        )
        if cached:
            ckv_cache, kpe_cache = pool.caches()
            arguments.update(ckv_cache=ckv_cache, kpe_cache=kpe_cache, slot_mapping=pool.slots(num_tokens))
        return {**arguments, **other}

    for name, pool in MlaPool.variants(device, dtype):
        size = 2048 if name == "production" else 20
        yield name, call(pool, 13, hidden_size=size)
        yield f"{name}, not cached", call(pool, 13, cached=False, hidden_size=size)
    small = MlaPool(device, dtype)
    rank, rope = small.kv_lora_rank, small.qk_rope_head_dim
    yield "decode", call(small, 1)
    yield "half-split pairs", call(small, 5, interleaved=False)
    yield "large eps", call(small, 5, eps=0.5)
    yield "many tokens", call(small, 70, cached=False)
    yield "empty", call(small, 0)
    yield "empty, not cached", call(small, 0, cached=False)
    yield "no blocks", call(MlaPool(device, dtype, num_blocks=0), 2, slot_mapping=small.ints([-1, -1]))
    padding = small.ints([-1, 3, -1], torch.int64)
    yield "padding", call(small, 3, slot_mapping=padding, positions=padding)
    yield "fewer slots than tokens", call(small, 8, slot_mapping=small.slots(5))
    yield (
        "int32 slots and positions",
        call(small, 3, slot_mapping=small.ints([4, -1, 11]), positions=small.ints([0, 1, 49])),
    )
    yield "zero rows", call(small, 3, hidden=small.randn(3, 20) * 0)
    yield "table in hidden's dtype", call(small, 5, cos_sin=cos_sin_table(50, rope, 1e4, dtype=dtype, device=device))
    yield "sliced hidden", call(small, 5, hidden=small.randn(5, 44)[:, 20:40])
    yield "transposed hidden", call(small, 5, hidden=small.randn(20, 5).T)
    yield "expanded hidden", call(small, 5, hidden=small.randn(1, 20).expand(5, -1))
    yield "transposed weight", call(small, 5, w_kva=small.randn(20, rank + rope, scale=0.2).T)
    yield "weight of a fused projection", call(small, 5, w_kva=small.randn(9 + rank + rope, 20, scale=0.2)[9:])
