"""Pages of one record as pages of another that holds the same numbers."""

import triton
import triton.language as tl


@triton.jit
def move(
    source, target, page, row, exists, SOURCE_B: tl.constexpr, SOURCE_S: tl.constexpr, TARGET_B: tl.constexpr,
    TARGET_S: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """COUNT words of some rows of a page from one place to another; strides are constants, for wide loads.

    HOW   "copy", "e8m0" (powers of two become bfloat16, as bits) or "zero", which reads nothing
    """
    n = tl.arange(0, BLOCK)
    inside = exists[:, None] & (n < COUNT)[None, :]
    if HOW == "zero":
        word = tl.zeros((row.shape[0], BLOCK), tl.int32)
    else:
        word = tl.load(source + page * SOURCE_B + (row * SOURCE_S)[:, None] + n[None, :], mask=inside, other=0)
    if HOW == "e8m0":
        exponent = word.to(tl.int32)
        word = tl.where(exponent == 0, 1 << 6, exponent << 7)  # 2^-127 is subnormal
        word = tl.where(exponent == 255, 0x7FC0, word)
    to = target + page * TARGET_B + (row * TARGET_S)[:, None] + n[None, :]
    tl.store(to, word.to(target.dtype.element_ty), mask=inside)


@triton.jit
def transcode(
    codes, to_codes, rope, to_rope, scales, to_scales, pad, end, block_size,
    CODES_B: tl.constexpr, CODES_S: tl.constexpr, TO_CODES_B: tl.constexpr, TO_CODES_S: tl.constexpr,
    CODES: tl.constexpr, CODES_BLOCK: tl.constexpr,
    ROPE_B: tl.constexpr, ROPE_S: tl.constexpr, TO_ROPE_B: tl.constexpr, TO_ROPE_S: tl.constexpr,
    ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    SCALES_B: tl.constexpr, SCALES_S: tl.constexpr, TO_SCALES_B: tl.constexpr, TO_SCALES_S: tl.constexpr,
    SCALES: tl.constexpr, SCALES_BLOCK: tl.constexpr, SCALES_HOW: tl.constexpr,
    PAD_B: tl.constexpr, PAD_S: tl.constexpr, PAD: tl.constexpr, PAD_BLOCK: tl.constexpr,
    END_B: tl.constexpr, END: tl.constexpr, END_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each byte of a page is written once. Program: ROWS rows of a page, and the padding at its end.

    codes, rope, scales   the fields of both records as words of some size; in capitals their strides by page and row,
                          the words of a row, and these padded to a power of two. ROPE 0: there is none
    pad, end              bytes of padding of a row and of a page, to be zeros; 0: there is none
    """
    tiles = tl.cdiv(block_size, ROWS)
    page, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < block_size
    move(
        codes, to_codes, page, row, exists, CODES_B, CODES_S, TO_CODES_B, TO_CODES_S, CODES, CODES_BLOCK, "copy",
    )  # fmt: skip
    if ROPE > 0:
        move(rope, to_rope, page, row, exists, ROPE_B, ROPE_S, TO_ROPE_B, TO_ROPE_S, ROPE, ROPE_BLOCK, "copy")
    move(
        scales, to_scales, page, row, exists, SCALES_B, SCALES_S, TO_SCALES_B, TO_SCALES_S, SCALES, SCALES_BLOCK,
        SCALES_HOW,
    )  # fmt: skip
    if PAD > 0:
        move(pad, pad, page, row, exists, PAD_B, PAD_S, PAD_B, PAD_S, PAD, PAD_BLOCK, "zero")
    if END > 0:
        first = tl.arange(0, 1)
        move(end, end, page, first, (first == 0) & (tile == 0), END_B, 0, END_B, 0, END, END_BLOCK, "zero")
