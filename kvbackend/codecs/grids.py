"""Value grids, their rounding, and the rules that make scales.

Sources: OCP 8-bit Floating Point (OFP8) 1.0 for E4M3 and E5M2; OCP Microscaling Formats (MX) 1.0 for E2M1, E8M0 and the
floor rule; NVIDIA NVFP4 for E4M3 scales; DeepSeek-V3.2 (inference/kernel.py) and DeepSeek-V4.1 (arXiv 2609.19969) for
powers of two rounded up; vLLM 0.33 (triton_reshape_and_cache_flash) for int8 and its smallest scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_FLOAT16 = 65504.0
SMALLEST_SCALE = 1e-6  # of the rule "amax", as vLLM has it: an all-zero row gets this and not 0
SMALLEST_E4M3_SCALE = 2.0**-9  # E4M3's smallest number


def without_nan(x: Tensor) -> Tensor:
    """float32, NaN as 0; infinities stay."""
    return x.to(torch.float32).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def magnitude(x: Tensor) -> Tensor:
    """|x| as scales see it: infinity counts as 65504. x float32 without NaN."""
    x = x.abs()
    return x.masked_fill(x == torch.inf, LARGEST_FLOAT16)


def divide(x: Tensor, number: float) -> Tensor:
    """x / number, a division on every device: given a Python number, torch's CUDA kernel multiplies by 1 / number."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


# ---------------------------------------------------------------------------------------------------- one number


def e4m3_codes(y: Tensor) -> Tensor:
    """float32 -> float8_e4m3fn: nearest, ties to even, saturating at +-448. What the cast alone does differs."""
    return y.clamp(-448, 448).to(torch.float8_e4m3fn)


def e5m2_codes(y: Tensor) -> Tensor:
    """float32 -> float8_e5m2: nearest, ties to even, saturating at +-57344; never inf."""
    return y.clamp(-57344, 57344).to(torch.float8_e5m2)


def int8_codes(y: Tensor) -> Tensor:
    """float32 -> int8: nearest, ties away from zero, saturating at -128 and 127."""
    y = y.clamp(-128, 127)
    whole = y.trunc()  # y + 0.5 would round for itself: 0.49999997 + 0.5 is 1
    return (whole + (y - whole).mul(2).trunc()).to(torch.int8)


def e2m1_codes(y: Tensor) -> Tensor:
    """float32 -> uint8 codes 0..15, not packed: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and bit 3 for the sign, which -0 keeps.

    Nearest, ties to the even code, saturating at +-6.
    """
    a = y.abs()
    code = (a > 0.25).to(torch.uint8)  # a tie goes down where the lower code is even, else up
    for midpoint, tie_goes_up in ((0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code = code + (a >= midpoint if tie_goes_up else a > midpoint)
    return code + y.signbit().to(torch.uint8) * 8


def e2m1_values(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 -> float32."""
    code = codes.to(torch.int32)
    low = code & 7
    # exponent low >> 1 and one bit of mantissa, put where float32 has them; 0 and 0.5 have no leading one
    normal = (((low >> 1) + 126) << 23 | (low & 1) << 22).view(torch.float32)
    value = torch.where(low < 2, low * 0.5, normal)
    return torch.where(code >= 8, -value, value)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., 2n] -> bytes [..., n]: the even index in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> uint8 codes 0..15 [..., 2n]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@dataclass(frozen=True)
class Grid:
    """One element type: `codes` rounds scaled float32 [..., n] to what is stored, `values` reads it as float32.

    largest   its largest finite number
    emax      exponent of that number
    floor     the smallest amax for which DeepSeek makes a power-of-two scale
    """

    largest: float
    emax: int
    floor: float
    codes: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]


def _as_float32(codes: Tensor) -> Tensor:
    return codes.to(torch.float32)


# by the dtype that codes are stored in, as `formats` names it
GRIDS = {
    "float8_e4m3fn": Grid(448.0, 8, 1e-4, e4m3_codes, _as_float32),
    "float8_e5m2": Grid(57344.0, 15, 1e-4, e5m2_codes, _as_float32),
    "int8": Grid(127.0, 6, 1e-4, int8_codes, _as_float32),
    "uint8": Grid(
        6.0, 2, 6 * 2.0**-126, lambda y: pack_nibbles(e2m1_codes(y)), lambda packed: e2m1_values(unpack_nibbles(packed))
    ),
}


# -------------------------------------------------------------------------------------------------------- scales


def pow2_ceil(r: Tensor) -> Tensor:
    """The smallest power of two that is at least r, as float8_e8m0fnu. r float32, finite, not negative.

    From the exponent's bits: ceil(log2f(r)) is one too small for the few r just above a power of two. Below the
    smallest normal float32 the answer is 2^-126, or 2^-127 for 0.
    """
    bits = r.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return exponent.clamp(max=254).to(torch.uint8).view(torch.float8_e8m0fnu)


def pow2_floor(amax: Tensor, emax: int) -> Tensor:
    """2^(floor(log2(amax)) - emax), at least 2^-127 (as for 0), as float8_e8m0fnu: OCP MX 1.0, section 6.3."""
    exponent = (amax.view(torch.int32) >> 23) - emax
    return exponent.clamp(min=0).to(torch.uint8).view(torch.float8_e8m0fnu)


def scale_values(scales: Tensor) -> Tensor:
    """Scales of any dtype as float32."""
    if scales.dtype is not torch.float8_e8m0fnu:
        return scales.to(torch.float32)
    exponent = scales.view(torch.uint8).to(torch.int32)
    bits = (exponent << 23).masked_fill(exponent == 0, 1 << 22)  # 2^-127 is subnormal
    return bits.masked_fill(exponent == 255, 0x7FC00000).view(torch.float32)


def make_scales(amax: Tensor, grid: Grid, rule: str, floor: float | None = None) -> Tensor:
    """The scale of numbers whose largest magnitude is amax, in the dtype that the rule stores.

    rule "amax"       float32 amax / largest, at least 1e-6 where no floor is given
         "pow2_ceil"  float8_e8m0fnu, amax / largest rounded up to a power of two: nothing clips
         "ocp_floor"  float8_e8m0fnu, 2^(floor(log2 amax) - emax): up to 1.99 of the largest may clip
         "e4m3"       float8_e4m3fn of amax / largest, within [2^-9, 448]: some 6 percent may clip
    floor   the smallest amax to make a scale for; None: the rule's own
    """
    if rule == "amax":
        if floor is None:
            return divide(amax, grid.largest).clamp(min=SMALLEST_SCALE)
        return divide(amax.clamp(min=floor), grid.largest)
    if rule == "pow2_ceil":
        return pow2_ceil(divide(amax.clamp(min=grid.floor if floor is None else floor), grid.largest))
    if rule == "ocp_floor":
        return pow2_floor(amax if floor is None else amax.clamp(min=floor), grid.emax)
    if rule == "e4m3":
        amax = amax if floor is None else amax.clamp(min=floor)
        return e4m3_codes(divide(amax, grid.largest).clamp(min=SMALLEST_E4M3_SCALE))
    raise AssertionError(f"no such rule: {rule}")
