"""Stable top-k: which columns of each row of scores are the largest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Int32
from ..spec import op
from . import _checks, _selecting
from ._math import compute_dtype
from ._samples import Maker


@op(group="selecting", exact=True)
def topk_indices(
    scores: Float[Tensor, "T n"],
    k: int,
    lengths: Int32[Tensor, "T"] | None = None,
    order: str = "score",
) -> Tensor:
    """Choose the k highest scores of each row; of equal ones, those at the lowest positions.

    scores    [T, n]; any strides
    k         how many to choose, at least 1; it may be more than n
    lengths   [T] columns of each row that count, from 0 to n; what lies beyond is not looked at. None: all
    order     "score": highest first, equal ones by position. "position": ascending, as sparse attention reads fastest
    Returns positions [T, k] int32; -1 in the tail where a row has fewer.

    NaN and -inf are never selected; -0.0 and 0.0 are equal. A row depends on nothing but itself.
    Source: torch.topk, whose order among equals is unspecified and for which NaN is the largest; the rule for ties is
    that of fastllm's DeepSeek-V4.1 (docs/deepseek_v41.md).
    """
    scores = scores.to(compute_dtype(scores))
    position = torch.arange(scores.shape[1], device=scores.device)
    if lengths is not None:
        scores = scores.masked_fill(position >= lengths[:, None], -torch.inf)
    best = _selecting.Best(scores, k)
    best.add(scores, position)
    return best.indices(order)


@topk_indices.check
def _(k, order, **_):
    _checks.selection(k, order)


@topk_indices.values
def _(scores, lengths, **_):
    if lengths is not None:
        _checks.within("lengths", lengths, 0, scores.shape[1] + 1, "length", f"scores have {scores.shape[1]} columns")


@topk_indices.fake
def _(scores, k, **_):
    return scores.new_empty(scores.shape[0], k, dtype=torch.int32)


@topk_indices.samples
def _(device, dtype):
    maker = Maker(device, dtype)

    def call(rows: int, n: int, k: int, lengths: list[int] | None = None, **other: Any) -> dict[str, Any]:
        scores = maker.randn(rows, n)
        for row, length in enumerate(lengths or []):
            scores[row, length:] = torch.inf  # whoever looks there selects it
        return {"scores": scores, "k": k, "lengths": maker.ints(lengths) if lengths else None, **other}

    def rows(*values: list[float], k: int = 3, **other: Any) -> dict[str, Any]:
        return {"scores": torch.tensor(values, dtype=dtype).to(device), "k": k, **other}

    nan, inf = torch.nan, torch.inf
    yield "plain", call(3, 40, 7)
    yield "by position", call(3, 40, 7, order="position")
    yield "lengths", call(5, 40, 7, [40, 7, 3, 0, 8])
    yield "lengths, by position", call(5, 40, 7, [40, 7, 3, 0, 8], order="position")
    yield "k of 1", call(3, 40, 1)
    yield "all columns", call(2, 9, 9)
    yield "more than there are", call(2, 9, 20)
    yield "no rows", call(0, 9, 4)
    yield "no columns", call(2, 0, 4)
    tied = rows([1.0, 2.0, 2.0, 2.0, 2.0], [0.0, -0.0, 0.0, -0.0, 0.0], [5.0, 5.0, 5.0, 5.0, 9.0], [-0.0, 0.0, 1, 1, 1])
    yield "ties", tied
    yield "ties, by position", tied | dict(order="position")
    strange = rows(
        [nan, 1.0, -nan, 2.0, 3.0], [nan] * 5, [-inf, inf, inf, -1.0, -inf], [-inf] * 5, [inf, nan, inf, inf, 2]
    )
    yield "NaN and infinities", strange
    yield "NaN and infinities, by position", strange | dict(order="position")
    heavy = torch.randint(0, 4, (3, 700), generator=maker.generator).to(dtype).to(device)
    yield "heavy ties", dict(scores=heavy, k=150)
    yield "heavy ties, by position", dict(scores=heavy, k=150, order="position")
    wide = maker.randn(30, 12)
    yield "transposed", dict(scores=wide.T, k=5)
    yield "strided rows and lengths", dict(scores=wide[::2, ::3], k=3, lengths=maker.ints([4, 0] * 15)[::2])
    yield "one row for all", dict(scores=wide[:1].expand(5, -1), k=5)
    yield "production", call(2, 3000, 512, [3000, 2500], order="position")
