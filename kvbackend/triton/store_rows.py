"""Rows packed into the records of their slots."""

import triton
import triton.language as tl

from .codecs import cast, e4m3_code, encode, int8_code, make_scale, scale_value
from .rows import magnitude, slots_of, without_nan


@triton.jit
def store_rows(
    rows, row_t, row_d, slots, slot_stride, codes, codes_b, codes_s, scales, scales_b, scales_s,
    rope, rope_b, rope_s, pad, pad_b, pad_s, block_size, num_rows,
    CODE: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr,
    RULE: tl.constexpr, NAN_SCALES: tl.constexpr, SHUFFLED: tl.constexpr, CODED: tl.constexpr, ROPE: tl.constexpr,
    PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PE: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    """The first CODED channels of a row become codes and scales, the ROPE after them bfloat16 or E4M3. Program: ROWS.

    codes, scales, rope, pad   the fields of the records and their strides by page and row; ROPE, PAD 0: there is none
    NAN_SCALES   a group with a NaN gets the scale NaN and codes of 0; else a NaN counts as 0
    SHUFFLED     the scale of group s of 32 is at 8 * (s & 3) + (s >> 2)
    """
    GROUPS: tl.constexpr = BLOCK_D // GROUP
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot, used = slots_of(r.to(tl.int64), r < num_rows, slots, slot_stride, True)
    page, offset = slot // block_size, slot % block_size
    row = (rows + r.to(tl.int64) * row_t)[:, None]
    d = tl.arange(0, BLOCK_D)
    x = tl.load(row + (d * row_d)[None, :], mask=used[:, None] & (d < CODED)[None, :], other=0.0).to(tl.float32)
    x = tl.reshape(x, (ROWS, GROUPS, GROUP))
    if NAN_SCALES:
        broken = tl.sum((x != x).to(tl.int32), axis=2) > 0
        x = tl.where(broken[:, :, None], 0.0, x)
    x = without_nan(x)
    scale = make_scale(tl.max(magnitude(x), axis=2), LARGEST, EMAX, FLOOR, RULE)
    if RULE == "pow2_ceil":
        number = scale_value(scale, "e8m0")
        if scales.dtype.element_ty != tl.uint8:
            scale = cast(number, scales.dtype.element_ty)
    elif RULE == "e4m3":
        number = scale_value(scale, "e4m3")
        if NAN_SCALES:
            scale = tl.where(broken, 0x7F, scale)
    else:
        scale = tl.minimum(scale, 65504.0).to(tl.float16)
        number = scale.to(tl.float32)
    g = tl.arange(0, GROUPS)
    place = g
    if SHUFFLED:
        place = 8 * (g & 3) + (g >> 2)
    scale_at = (scales + page * scales_b + offset * scales_s)[:, None] + place[None, :]
    tl.store(scale_at, scale.to(scales.dtype.element_ty), mask=used[:, None] & (g * GROUP < CODED)[None, :])

    y = tl.div_rn(x, number[:, :, None])
    if CODE == "int8":  # Ascend's index keys round to nearest even
        code = int8_code((y + 12582912.0) - 12582912.0)
    else:
        code = encode(y, CODE)
    code_row = (codes + page * codes_b + offset * codes_s)[:, None]
    if CODE == "e2m1":
        low, high = tl.split(tl.reshape(code, (ROWS, BLOCK_D // 2, 2)))
        half = tl.arange(0, BLOCK_D // 2)
        there = used[:, None] & (2 * half < CODED)[None, :]
        tl.store(code_row + half[None, :], (low | (high << 4)).to(tl.uint8), mask=there)
    else:
        code = tl.reshape(code, (ROWS, BLOCK_D))
        tl.store(code_row + d[None, :], code.to(tl.uint8), mask=used[:, None] & (d < CODED)[None, :])

    if ROPE > 0:
        e = tl.arange(0, BLOCK_PE)
        there = used[:, None] & (e < ROPE)[None, :]
        turned = tl.load(row + ((CODED + e) * row_d)[None, :], mask=there, other=0.0).to(tl.float32)
        if rope.dtype.element_ty == tl.uint8:
            stored = e4m3_code(without_nan(turned)).to(tl.uint8)
        else:
            stored = cast(turned, rope.dtype.element_ty)
        tl.store((rope + page * rope_b + offset * rope_s)[:, None] + e[None, :], stored, mask=there)
    if PAD > 0:
        p = tl.arange(0, BLOCK_PAD)
        zeros = tl.zeros((ROWS, BLOCK_PAD), tl.uint8)
        pad_at = (pad + page * pad_b + offset * pad_s)[:, None] + p[None, :]
        tl.store(pad_at, zeros, mask=used[:, None] & (p < PAD)[None, :])
