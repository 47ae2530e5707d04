"""Rows into the slots of caches: what reshape_and_cache and concat_and_cache_mla share."""

from __future__ import annotations

from torch import Tensor

from ...codecs import split
from ...formats import KVFormat
from ...ops._formats import Cached
from . import cached, launching

TILE = 4096  # elements of a program, about


def tile(width: int, elements: int = TILE) -> dict[str, int]:
    """ROWS and BLOCK_D for rows of some width and programs of some elements."""
    block = launching.power_of_two(width)
    return dict(ROWS=max(elements // block, 1), BLOCK_D=block)


def write(cache: Cached, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, Hk, D], or [T, D] to a latent cache, to their slots; -1 skips one."""
    rows = rows[: slots.shape[0]]
    if rows.dim() == 2:
        rows = rows.unsqueeze(1)
    fmt = cache.format
    if rows.numel() == 0 or cache.cache.numel() == 0:
        return
    if fmt is not None and fmt.quantized:
        encode(cached.operand(cache), fmt, rows, slots, cache.cache.shape[1], fmt.granularity in split.STATIC)
        return
    from ...triton.rows import write_rows

    rows, pages = launching.as_integers(rows), launching.as_integers(cache.cache)
    pages = pages.unsqueeze(2) if pages.dim() == 3 else pages
    num_tokens, heads, dim = rows.shape
    tiles = tile(dim)
    launching.launch(
        write_rows, (launching.cdiv(num_tokens * heads, tiles["ROWS"]),), rows, *rows.stride(), slots, slots.stride(0),
        pages, *pages.stride(), pages.shape[1], num_tokens * heads, heads, dim, **tiles,
    )  # fmt: skip


def encode(
    operand: cached.Operand, fmt: KVFormat, rows: Tensor, slots: Tensor | None, block_size: int, given: bool
) -> None:
    """Encode rows [T, Hk, D] into an operand; without slots, row t goes to slot t."""
    from ...triton.rows import write_encoded_rows

    num_tokens, heads, dim = rows.shape
    constants = {**operand.constants, **cached.encoding(fmt, dim, given)}
    groups = launching.cdiv(dim, constants["GROUP"])
    num_groups, per_program = num_tokens * heads * groups, max(TILE // 2 // constants["GROUP"], 1)
    launching.launch(
        write_encoded_rows, (launching.cdiv(num_groups, per_program),), rows, *rows.stride(),
        rows if slots is None else slots, 0 if slots is None else slots.stride(0), *operand.rows, *operand.scales[:-1],
        operand.number, block_size, num_groups, heads, groups, dim, GROUPS=per_program, HAS_SLOTS=slots is not None,
        **constants, enable_fp_fusion=False,
    )  # fmt: skip


def read(
    operand: cached.Operand, slots: Tensor | None, out: Tensor, heads: int, dim: int, block_size: int, cast: bool
) -> None:
    """out [num_tokens, heads, dim], dense, = the rows of slots, decoded, or converted where `cast`; zeros at -1."""
    from ...triton.rows import read_rows

    tiles, num_rows = tile(dim), out.numel() // max(dim, 1)
    launching.launch(
        read_rows, (launching.cdiv(num_rows, tiles["ROWS"]),), *operand.rows, *operand.scales, operand.number,
        out if slots is None else slots, 1, out, block_size, num_rows, heads, dim,
        **operand.constants, CAST=cast, HAS_SLOTS=slots is not None, **tiles, enable_fp_fusion=False,
    )  # fmt: skip
