"""Rotation of pairs of channels."""

import triton
import triton.language as tl

from .codecs import cast


@triton.jit
def apply_rope(
    x, x_t, x_h, x_d, positions, position_stride, table, table_p, table_d, out, num_rows, num_heads, dim, first, half,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, H, D], dense, = x with the channels from `first` on turned by the angles of its position; -1 copies.

    Each channel is loaded with its partner, so the pairs need not lie side by side. Program: a tile of rows (of one
    token and head each).
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head, exists = (r // num_heads).to(tl.int64), (r % num_heads).to(tl.int64), r < num_rows
    position = tl.load(positions + token * position_stride, mask=exists, other=-1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    at = d - first  # channel within the rotated part
    if INTERLEAVED:
        pair, second = at // 2, at % 2 == 1
        partner = tl.where(second, d - 1, d + 1)
    else:
        pair, second = tl.where(at >= half, at - half, at), at >= half
        partner = tl.where(second, d - half, d + half)
    rotated = (at >= 0) & (at < 2 * half)
    inside = exists[:, None] & (d < dim)[None, :]
    turns = inside & rotated[None, :] & (position >= 0)[:, None]
    row = x + (token * x_t + head * x_h)[:, None]
    own = tl.load(row + (d * x_d)[None, :], mask=inside, other=0.0)
    other = tl.load(row + (partner * x_d)[None, :], mask=turns, other=0.0).to(tl.float32)
    angle = table + (position * table_p)[:, None] + (pair * table_d)[None, :]
    cos = tl.load(angle, mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(angle + half * table_d, mask=turns, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    turned = own.to(tl.float32) * cos + other * tl.where(second[None, :], sin, -sin)
    store = out + r.to(tl.int64)[:, None] * dim + d[None, :]
    tl.store(store, own, mask=inside & (turns == 0))
    tl.store(store, cast(turned, out.dtype.element_ty), mask=turns)


@triton.jit
def turn_pairs(
    x, position, table, table_p, table_d, first, half, INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """float32 rows [ROWS, BLOCK_D] of one position with interleaved pairs of channels, from `first` on, which is even,
    turned in place; a negative position turns nothing."""
    even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK_D // 2, 2)))
    pair = tl.arange(0, BLOCK_D // 2) - first // 2
    turns = (position >= 0) & (pair >= 0) & (pair < half)
    angle = table + position.to(tl.int64) * table_p + pair * table_d
    cos = tl.load(angle, mask=turns, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(angle + half * table_d, mask=turns, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        sin = -sin
    return tl.interleave(even * cos - odd * sin, even * sin + odd * cos)
