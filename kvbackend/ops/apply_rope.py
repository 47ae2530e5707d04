"""Rotate queries and keys by their positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Index, need
from ..rope import cos_sin_table
from ..spec import op
from . import _checks
from ._math import rotate_at
from ._samples import Maker


@op(group="rotary")
def apply_rope(
    x: Float[Tensor, "T H D"],
    positions: Index[Tensor, "T"],
    cos_sin: Float[Tensor, "P rotary_dim"],
    interleaved: bool = False,
    trailing: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Rotate pairs of each head's dims by the angles of its token's position.

    x             [T, H, D], queries or keys; any strides
    positions     [T], position of each token; -1 is no token: its row is returned as it is
    cos_sin       [P, rotary_dim], cosines in the first half and sines in the second, of each position (see
                  `kvbackend.rope.cos_sin_table`); float32 or x's dtype; rotary_dim even and at most D
    interleaved   pairs are (0, 1), (2, 3), ... as in GPT-J and MLA; else (i, i + rotary_dim/2) as in GPT-NeoX and Llama
    trailing      rotate the last rotary_dim dims instead of the first; the others are returned as they are
    inverse       rotate back
    Returns [T, H, D] in x's dtype, each pair in the places it came from; products and sums are float32.

    Undefined: on accelerators, a position of P or more, or below -1 (the CPU kernel returns the row as it is).
    Source: RoFormer (arXiv 2104.09864), section 3.2.2.
    """
    rotary_dim = cos_sin.shape[1]
    first = x.shape[2] - rotary_dim if trailing else 0
    before, rotated, after = x.split((first, rotary_dim, x.shape[2] - first - rotary_dim), -1)
    return torch.cat((before, rotate_at(rotated, positions, cos_sin, interleaved, inverse), after), -1).contiguous()


@apply_rope.check
def _(x, cos_sin, **_):
    _checks.rotary_table("x", x, cos_sin)
    need(
        cos_sin.shape[1] <= x.shape[2],
        f"cos_sin rotates {cos_sin.shape[1]} dims but x has {x.shape[2]}; it must be at most that: pass the table of "
        f"this model",
    )


@apply_rope.values
def _(positions, cos_sin, **_):
    _checks.positions_within(positions, cos_sin)


@apply_rope.fake
def _(x, **_):
    return x.new_empty(x.shape)


@apply_rope.samples
def _(device, dtype):
    make = Maker(device, dtype)

    def call(
        tokens: int,
        heads: int = 3,
        dim: int = 16,
        rotary_dim: int = 16,
        table_dtype: torch.dtype = torch.float32,
        index: torch.dtype = torch.int64,
        **other: Any,
    ) -> dict[str, Any]:
        positions = make.ints([(7 * t) % 50 for t in range(tokens)], index)
        table = cos_sin_table(50, rotary_dim, 1e4, dtype=table_dtype, device=device)
        return {"x": make.randn(tokens, heads, dim), "positions": positions, "cos_sin": table, **other}

    yield "decode", call(1)
    yield "many tokens", call(70)
    yield "interleaved", call(5, interleaved=True)
    yield "inverse", call(5, inverse=True)
    yield "interleaved, inverse", call(5, interleaved=True, inverse=True)
    yield "leading dims", call(5, rotary_dim=6)
    yield "leading dims, interleaved", call(5, rotary_dim=6, interleaved=True)
    yield "trailing dims", call(5, rotary_dim=6, trailing=True)
    yield "trailing dims, interleaved", call(5, rotary_dim=6, interleaved=True, trailing=True, inverse=True)
    yield "one head, odd dims", call(4, heads=1, dim=7, rotary_dim=2)
    yield "table in x's dtype", call(5, table_dtype=dtype)
    yield "int32 positions", call(5, index=torch.int32)
    yield "padding", call(3, positions=make.ints([-1, 4, -1], torch.int64))
    yield "last position", call(1, positions=make.ints([49]))
    yield "empty", call(0)
    yield "no heads", call(3, heads=0)
    yield "sliced dims", call(5, x=make.randn(5, 3, 40)[..., 24:])
    yield "rotary part of a fused row", call(5, rotary_dim=64, x=make.randn(5, 576)[:, None, 512:], interleaved=True)
    yield "sliced heads", call(5, x=make.randn(5, 9, 16)[:, 3:6])
    yield "heads before tokens", call(5, x=make.randn(3, 5, 16).transpose(0, 1))
    yield "expanded heads", call(5, x=make.randn(5, 1, 16).expand(-1, 3, -1))
    yield "expanded tokens", call(5, x=make.randn(1, 3, 16).expand(5, -1, -1), positions=make.ints([9]).expand(5))
    wide = cos_sin_table(50, 16, 1e4, device=device)
    yield "sliced table", call(5, cos_sin=torch.cat((wide, wide), -1)[::2, :16], positions=make.ints([3, 24, 0, 7, 1]))
    yield "production", call(4, heads=128, dim=192, rotary_dim=64, interleaved=True, trailing=True)
