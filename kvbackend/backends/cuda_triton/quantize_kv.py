"""Rows are written as to a cache of one block, where token t has slot t. Scales of all tokens take a pass before."""

import torch

from ...codecs import grids, split
from ...formats import get
from . import cached, launching, rows

TOKENS, TILE = 32, 8192  # at most, of a program that looks for the largest magnitude, and its numbers


def unsupported(x, kv_format, role, **_):
    yield from launching.floats(x=x)
    if split.across_tokens(get(kv_format), role):
        yield (
            f"kv_format is {kv_format!r} for keys, whose groups span tokens; the Triton kernel encodes single rows: "
            f"choose a format with scales per token"
        )


def run(x, kv_format, scale, global_scale, role):
    fmt = get(kv_format)
    if not fmt.quantized:
        return split.encode(x, fmt, role)
    codes = x.new_empty(split.codes_shape(fmt, x.shape), dtype=split.storage(fmt))
    static = fmt.granularity in split.STATIC
    if scale is not None:
        scales = scale.clone()
    elif static:
        scales = grids.make_scales(amax(x, fmt), grids.GRIDS[fmt.storage], fmt.rule)
    else:
        scales = x.new_empty(split.scales_shape(fmt, role, x.shape), dtype=split.scale_dtype(fmt))
    if x.numel():
        pages = scales if static else scales[None]
        number = scales if global_scale is None else global_scale
        operand = cached.quantized(codes[None], pages, number, fmt, role)
        rows.encode(operand, fmt, x, None, max(x.shape[0], 1), static)
    return codes, scales


def amax(x, fmt):
    """The largest magnitude under each scale that covers all tokens."""
    from ...triton.rows import amax_of_rows

    num_tokens, heads, dim = x.shape
    bits = torch.zeros(split.scales_shape(fmt, "key", x.shape), dtype=torch.int32, device=x.device)
    strides = {"tensor": (0, 0), "head": (1, 0), "channel": (dim, 1)}[fmt.granularity]
    tiles = rows.tile(dim, TILE)
    tiles["ROWS"] = min(tiles["ROWS"], TOKENS)
    launching.launch(
        amax_of_rows, (launching.cdiv(num_tokens, tiles["ROWS"]), heads), x, *x.stride(), bits, *strides, num_tokens,
        dim, **tiles, PER_CHANNEL=fmt.granularity == "channel",
    )  # fmt: skip
    return bits.view(torch.float32)
