"""Merge attention over disjoint sets of keys into attention over all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Float32, need
from ..spec import op
from ._math import apply_sinks, compute_dtype
from ._samples import Maker


@op(group="dense attention")
def merge_attn_states(
    outs: Float[Tensor, "N T H Dv"],
    lses: Float32[Tensor, "N T H"],
    sinks: Float32[Tensor, "H"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge N partial attention results over disjoint keys into the exact result over all keys.

    outs    [N, T, H, Dv], the partial outputs, without sinks; N at least 1; any strides
    lses    [N, T, H], natural log of each part's sum of exponentials. -inf means that the part saw no key, and so does
            +inf, with which other libraries mark such rows; its row of `outs` may hold anything then, NaN too.
    sinks   [H], logit of each head's attention sink, which enters the denominator once, after the merge; +inf gives 0
    Returns out [T, H, Dv] in outs' dtype, and lse [T, H] float32 without the sink. Where every part is empty they are
    0 and -inf. A NaN lse makes the merged row NaN.

    Source: FlashAttention (arXiv 2205.14135), section 3.1; sinks as in gpt-oss (arXiv 2508.10925).
    """
    dtype = compute_dtype(outs)
    empty = lses.isinf()
    lses = lses.to(dtype).masked_fill(empty, -torch.inf)
    largest = lses.amax(0)  # [T, H]
    weights = (lses - largest.masked_fill(largest == -torch.inf, 0)).exp()  # [N, T, H]
    total = weights.sum(0)
    lse = largest + total.log()
    weights = weights / total.masked_fill(total == 0, 1)  # all empty: 0 / 1
    out = (outs.to(dtype).masked_fill(empty[..., None], 0) * weights[..., None]).sum(0)  # [T, H, Dv]
    if sinks is not None:
        out = apply_sinks(out, lse, sinks)
    return out.to(outs.dtype), lse.to(torch.float32)


@merge_attn_states.check
def _(outs, **_):
    need(outs.shape[0] > 0, "outs has no partial result to merge; there must be at least one: stack them along dim 0")


@merge_attn_states.fake
def _(outs, lses, **_):
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


@merge_attn_states.samples
def _(device, dtype):
    inf, nan = torch.inf, torch.nan
    make = Maker(device, dtype)

    def call(parts: int, tokens: int, heads: int = 3, value_dim: int = 10, **other: Any) -> dict[str, Any]:
        lses = make.randn(parts, tokens, heads, scale=3).float()
        return {"outs": make.randn(parts, tokens, heads, value_dim), "lses": lses, "sinks": None, **other}

    def states(rows: list[list[float]], **other: Any) -> dict[str, Any]:
        """One row per token, its parts' lse: rows of states without keys are NaN."""
        lses = torch.tensor(rows).T[..., None].repeat(1, 1, 2)  # [N, T, 2]
        outs = make.randn(*lses.shape, 5)
        outs = torch.where(lses.isinf()[..., None].to(device), nan, outs)
        return {"outs": outs, "lses": lses.to(device), "sinks": None, **other}

    sinks = torch.tensor([0.3, -inf, 2.0]).to(device)
    yield "decode", call(2, 1)
    yield "one part", call(1, 4)
    yield "three parts", call(3, 5)
    yield "many tokens", call(2, 300, sinks=sinks)
    yield "sinks", call(2, 5, sinks=sinks)
    yield "infinite sink", call(2, 5, sinks=torch.tensor([inf, 0.0, -1e30]).to(device))
    two = [[-inf, -inf], [-inf, 1.5], [1.5, -inf], [inf, 1.5], [1.5, inf], [inf, inf], [inf, -inf], [0.5, 0.5]]
    yield "empty states", states(two)
    yield "empty states and sinks", states(two, sinks=torch.tensor([0.7, -1.0]).to(device))
    yield "empty states of three", states([[-inf, -inf, -inf], [inf, 2.0, -inf], [-inf, -inf, 0.0], [1.0, 2.0, 3.0]])
    yield "one empty part", states([[-inf], [inf], [1.0]])
    yield "far apart", states([[200.0, -200.0], [-3e38, 3e38], [1e4, 1e4]])
    yield "NaN lse", states([[nan, 1.0], [1.0, nan], [nan, -inf], [0.0, 1.0]])
    yield "empty", call(2, 0)
    yield "no heads", call(2, 3, heads=0)
    wide = make.randn(2, 4, 3, 30)
    yield "sliced values", call(2, 4, outs=wide[..., 7:17])
    yield (
        "heads before tokens",
        call(2, 4, outs=make.randn(2, 3, 4, 10).transpose(1, 2), lses=make.randn(2, 3, 4).float().transpose(1, 2)),
    )
    yield "expanded", call(3, 4, outs=make.randn(1, 4, 3, 10).expand(3, -1, -1, -1))
    yield "production", call(2, 16, heads=128, value_dim=128)
