"""Numbers of 8 and 4 bits and their scales, to the bit as `kvbackend.codecs.grids` has them.

CODE    "e4m3", "e5m2", "int8", "e2m1" (two in a byte) or "int4" (unsigned, two in a byte)
SCALE   dtype of the scales: "float32", "float16", "bfloat16", "e8m0" or "e4m3"
RULE    how a scale comes from the largest magnitude: as in `grids.make_scales`
"""

import triton
import triton.language as tl


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, nearest even. The interpreter truncates to bfloat16, so the bits are rounded here."""
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x != x, x, bits.to(tl.float32, bitcast=True)).to(tl.bfloat16)
    return x.to(DTYPE)


@triton.jit
def truncate(x):
    """Toward zero; |x| below 2^31."""
    return x.to(tl.int32).to(tl.float32)


# ---------------------------------------------------------------------------------------------------------- decode


# The bits of exponent and mantissa stand where float32 has them, and a power of two makes up for the exponents' biases;
# so a subnormal code is a subnormal float32 before that product, which must not be flushed to 0.


@triton.jit
def e4m3_value(code):
    """int32 byte -> float32."""
    value = (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((code & 127) == 127, float("nan"), value)


@triton.jit
def e5m2_value(code):
    """int32 byte -> float32; all exponent bits set are inf and NaN."""
    bits = ((code & 127) << 21) | ((code & 128) << 24)
    value = bits.to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
    return tl.where((code & 124) == 124, (bits | 0x7F800000).to(tl.float32, bitcast=True), value)


@triton.jit
def e2m1_value(code):
    """int32 nibble -> float32."""
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def decode(code, CODE: tl.constexpr):
    """int32 codes -> float32, unscaled."""
    if CODE == "e4m3":
        return e4m3_value(code)
    if CODE == "e5m2":
        return e5m2_value(code)
    if CODE == "e2m1":
        return e2m1_value(code)
    if CODE == "int8":
        return ((code << 24) >> 24).to(tl.float32)
    return code.to(tl.float32)  # int4


@triton.jit
def scale_value(scale, SCALE: tl.constexpr):
    """A scale as it is stored (powers of two and e4m3 as bytes) -> float32."""
    if SCALE == "e8m0":
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is subnormal
        return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    if SCALE == "e4m3":
        return e4m3_value(scale.to(tl.int32))
    return scale.to(tl.float32)


# ---------------------------------------------------------------------------------------------------------- encode


@triton.jit
def sign_bit(y, BIT: tl.constexpr):
    """BIT where y is negative, -0 included."""
    return tl.where(y.to(tl.int32, bitcast=True) < 0, BIT, 0)


@triton.jit
def e4m3_code(y):
    """float32 without NaN -> int32 byte; nearest even, saturating at +-448."""
    a = tl.minimum(tl.abs(y), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (a + 16384.0).to(tl.int32, bitcast=True) & 15  # 16384 has its last bit at 2^-9
    return sign_bit(y, 128) | tl.where(a < 0.015625, subnormal, normal)


@triton.jit
def e5m2_code(y):
    """float32 without NaN -> int32 byte; nearest even, saturating at +-57344."""
    a = tl.minimum(tl.abs(y), 57344.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    subnormal = (a + 128.0).to(tl.int32, bitcast=True) & 7  # 128 has its last bit at 2^-16
    return sign_bit(y, 128) | tl.where(a < 0.00006103515625, subnormal, normal)


@triton.jit
def e2m1_code(y):
    """float32 without NaN -> int32 nibble; nearest, ties to the even code, saturating at +-6."""
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return sign_bit(y, 8) | code


@triton.jit
def int8_code(y):
    """float32 without NaN -> int32 byte; nearest, ties away from zero, saturating."""
    y = tl.minimum(tl.maximum(y, -128.0), 127.0)
    whole = truncate(y)
    return (whole + truncate((y - whole) * 2.0)).to(tl.int32) & 255


@triton.jit
def int4_code(y):
    """float32 without NaN -> int32 0..15; nearest even."""
    y = tl.minimum(tl.maximum(y, 0.0), 15.0)
    return ((y + 8388608.0) - 8388608.0).to(tl.int32)  # 2^23 has its last bit at 1


@triton.jit
def encode(y, CODE: tl.constexpr):
    """Scaled float32 without NaN -> int32 codes."""
    if CODE == "e4m3":
        return e4m3_code(y)
    if CODE == "e5m2":
        return e5m2_code(y)
    if CODE == "e2m1":
        return e2m1_code(y)
    if CODE == "int8":
        return int8_code(y)
    return int4_code(y)


@triton.jit
def make_scale(amax, LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, RULE: tl.constexpr):
    """The scale, as it is stored, of numbers whose largest magnitude is amax."""
    if RULE == "pow2_ceil":
        bits = tl.div_rn(tl.maximum(amax, FLOOR), LARGEST).to(tl.int32, bitcast=True)
        scale = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 254)
    elif RULE == "ocp_floor":
        scale = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - EMAX, 0)
    elif RULE == "e4m3":
        scale = e4m3_code(tl.maximum(tl.div_rn(amax, LARGEST), FLOOR))
    else:  # amax
        scale = tl.maximum(tl.div_rn(amax, LARGEST), FLOOR)
    return scale
