"""The bit-exact codecs: what `formats` names, computed. Plain torch, on any device, without a look at a value.

    grids     numbers to codes and back, one number at a time; scale rules; two 4-bit codes in a byte
    split     `encode` and `decode`: rows of a split cache in a format, with scales in a tensor of their own
    records   `pack_record` and `unpack_record`: rows packed with their scales into pages of bytes

Arithmetic is float32 throughout (float64 is rounded to it first), and every division is one: x / s, never x * (1 / s).

Numbers that are not finite, in every quantized code:
    NaN     becomes 0, and counts as 0 for the scale. One exception, which the record's readers share: in the records
            `v41_fp4_288*` a NaN makes the scale of its 16 channels NaN and their codes 0.
    inf     saturates: its code is the largest of its sign. For a scale that is computed it counts as 65504, float16's
            largest, so that a lone inf does not erase its neighbours. `int4`, whose scales are float16, limits every
            number to +-65504.
Formats without codes (bf16, fp16, fp32) and the bfloat16 rotary part of records keep NaN and inf as they are.

Scales of 2^n (UE8M0) are `torch.float8_e8m0fnu`, as `formats` says: the dtype tells how the bytes read, so they cannot
be taken for codes, and a view as uint8 costs nothing. torch has no arithmetic for it; `grids.scale_values` has.
"""

from __future__ import annotations

from .records import join_pages, pack_record, split_pages, unpack_record
from .split import decode, encode, global_scale_of

__all__ = ["decode", "encode", "global_scale_of", "join_pages", "pack_record", "split_pages", "unpack_record"]
