"""What follows the projection of hidden states to MLA's row: norm, rotation and the writes."""

import triton
import triton.language as tl

from .codecs import cast
from .rows import slots_of


@triton.jit
def norm_and_rope(
    projected, projected_t, norm_weight, norm_d, positions, position_stride, table, table_p, table_d, ckv, kpe,
    slots, slot_stride, ckv_cache, ckv_b, ckv_s, ckv_d, kpe_cache, kpe_b, kpe_s, kpe_d, block_size, num_slots, rank,
    half, eps,
    INTERLEAVED: tl.constexpr, CACHED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PE: tl.constexpr,
):  # fmt: skip
    """ckv [T, rank] and kpe [T, 2 * half], dense, of projected rows [T, rank + 2 * half], dense channels. Program: one
    token. CACHED: they are also written to the slots of the first num_slots tokens."""
    token = tl.program_id(0).to(tl.int64)
    row = projected + token * projected_t
    d = tl.arange(0, BLOCK_D)
    latent = tl.load(row + d, mask=d < rank, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + d * norm_d, mask=d < rank, other=0.0).to(tl.float32)
    latent = cast(latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / rank + eps) * weight, ckv.dtype.element_ty)
    tl.store(ckv + token * rank + d, latent, mask=d < rank)

    e = tl.arange(0, BLOCK_PE)
    if INTERLEAVED:
        pair, second = e // 2, e % 2 == 1
        partner = tl.where(second, e - 1, e + 1)
    else:
        pair, second = tl.where(e >= half, e - half, e), e >= half
        partner = tl.where(second, e - half, e + half)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    there = e < 2 * half
    turns = there & (position >= 0)
    own = tl.load(row + rank + e, mask=there, other=0.0).to(tl.float32)
    other = tl.load(row + rank + partner, mask=there, other=0.0).to(tl.float32)
    angle = table + position * table_p + pair * table_d
    cos = tl.load(angle, mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(angle + half * table_d, mask=turns, other=0.0).to(tl.float32)
    turned = tl.where(turns, own * cos + other * tl.where(second, sin, -sin), own)  # 0 times an infinite other is NaN
    rotary = cast(turned, kpe.dtype.element_ty)
    tl.store(kpe + token * (2 * half) + e, rotary, mask=there)

    if CACHED:
        slot, used = slots_of(token, token < num_slots, slots, slot_stride, True)
        block, offset = slot // block_size, slot % block_size
        at = ckv_cache + block * ckv_b + offset * ckv_s
        tl.store(at + d * ckv_d, latent, mask=used & (d < rank))
        pe_at = kpe_cache + block * kpe_b + offset * kpe_s
        tl.store(pe_at + e * kpe_d, rotary, mask=used & there)
