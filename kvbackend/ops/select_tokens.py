"""Which tokens of a sequence eviction keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Int32, need, one_of
from ..spec import op
from . import _checks
from ._math import compute_dtype
from ._samples import Maker

POOLINGS = ("none", "avg", "max")


@op(group="evicting", exact=True)
def select_tokens(
    scores: Float[Tensor, "B Hs S"],
    seq_lens: Int32[Tensor, "B"],
    budget: int,
    num_sinks: int = 0,
    num_recent: int = 0,
    pooling: str = "none",
    kernel: int = 1,
    budgets: Int32[Tensor, "B"] | None = None,
) -> Tensor:
    """Choose the tokens to keep: the first ones, the last ones, and between them those of the highest scores.

    scores       [B, Hs, S]: a set for each kv head (Hs = Hk), or one for all (Hs = 1); columns past seq_lens are not
                 looked at
    seq_lens     [B] tokens of each sequence, at most S
    budget       tokens to keep of a sequence, sinks and recent ones included; at least num_sinks + num_recent
    num_sinks    the first tokens, kept whatever their score
    num_recent   the last tokens, kept whatever their score
    pooling      "avg" or "max": a score first becomes that of its neighbourhood, over the tokens before the recent ones
    kernel       tokens of the neighbourhood, odd: kernel // 2 on each side. The average counts zeros beyond both ends
                 (its divisor is always kernel); a maximum does not look there
    budgets      [B] a budget for each sequence, from num_sinks + num_recent to budget
    Returns positions [B, Hs, budget] int32, ascending; -1 in the tail where a sequence has fewer tokens.

    Of equal scores, the lowest position is kept. NaN and -inf are never selected, and in pooling their neighbours see 0
    (avg) or nothing (max); so a sequence may keep less than its budget.
    An average's terms are added in the order of positions, in float32 (float64 for such scores); dividing by kernel
    would not change their order, so it is left out.
    Source: SnapKV (arXiv 2404.14469), listing 1; with a kernel of 1 the selection of H2O (arXiv 2306.14048) and TOVA
    (arXiv 2401.06104).
    """
    need_sizes(budget, num_sinks, num_recent, kernel)
    num_seqs, num_sets, width = scores.shape
    scores = scores.to(compute_dtype(scores))
    position = torch.arange(width, device=scores.device)
    length = seq_lens.long()[:, None, None]
    exists = position < length  # [B, 1, S]
    recent = exists & (position >= length - num_recent)
    forced = recent | (exists & (position < num_sinks))
    earlier = exists & ~recent
    wanted = earlier & (scores > -torch.inf)  # NaN compares false
    scores = _pooled(scores, wanted, pooling, kernel)
    wanted = wanted & ~forced
    # an unstable sort would leave ties to chance
    order = scores.masked_fill(~wanted, -torch.inf).sort(stable=True, dim=-1, descending=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, position.expand_as(order).contiguous())
    total = budget if budgets is None else budgets.long()[:, None, None].clamp(max=budget)
    kept = forced | (wanted & (rank < total - forced.sum(-1, keepdim=True)))
    kept = kept.expand(num_seqs, num_sets, width)
    ascending = torch.where(kept, position, width).sort(-1).values[..., :budget]
    out = torch.where(ascending < width, ascending, -1).int()
    return torch.nn.functional.pad(out, (0, max(budget - out.shape[-1], 0)), value=-1)


def _pooled(scores: Tensor, usable: Tensor, pooling: str, kernel: int) -> Tensor:
    """Sum or maximum of the usable scores of each neighbourhood: [B, Hs, S]."""
    if pooling == "none" or kernel == 1:
        return scores
    empty = 0.0 if pooling == "avg" else -torch.inf
    half = kernel // 2
    padded = torch.nn.functional.pad(torch.where(usable, scores, empty), (half, half), value=empty)
    pooled = padded[..., : scores.shape[-1]]
    for shift in range(1, kernel):
        other = padded[..., shift : shift + scores.shape[-1]]
        pooled = pooled + other if pooling == "avg" else torch.maximum(pooled, other)
    return pooled


def need_sizes(budget: Any, num_sinks: Any, num_recent: Any, kernel: Any) -> None:
    # not in `check`: what that reads, a resolved callable is bound to, and budgets differ from layer to layer
    for name, count in (("num_sinks", num_sinks), ("num_recent", num_recent)):
        need(count >= 0, f"{name} is {count}; it must be 0 or more: pass 0 to force none")
    need(
        budget >= num_sinks + num_recent,
        f"budget is {budget}; it must be at least {num_sinks} sinks plus {num_recent} recent tokens, which are always "
        f"kept: raise the budget or force fewer",
    )
    need(
        kernel >= 1 and kernel % 2 == 1,
        f"kernel is {kernel}; a neighbourhood has as many tokens on each side, so it must be odd: pass 1, 3, 5, 7 ...",
    )


@select_tokens.check
def _(pooling, **_):
    need(pooling in POOLINGS, f"pooling is {pooling!r}; it must be {one_of(POOLINGS)}: choose one")


@select_tokens.values
def _(scores, seq_lens, budget, num_sinks, num_recent, budgets, **_):
    _checks.within("seq_lens", seq_lens, 0, scores.shape[2] + 1, "length", f"scores have {scores.shape[2]} columns")
    if budgets is not None:
        least = num_sinks + num_recent
        _checks.within("budgets", budgets, least, budget + 1, "budget", f"{least} tokens are kept whatever their score")


@select_tokens.fake
def _(scores, budget, num_sinks, num_recent, kernel, **_):
    need_sizes(budget, num_sinks, num_recent, kernel)
    return scores.new_empty(*scores.shape[:2], budget, dtype=torch.int32)


@select_tokens.samples
def _(device, dtype):
    maker = Maker(device, dtype)

    def call(seq_lens: list[int], sets: int = 2, budget: int = 6, **other: Any) -> dict[str, Any]:
        scores = maker.randn(len(seq_lens), sets, max(seq_lens, default=0) + 1)
        for b, length in enumerate(seq_lens):
            scores[b, :, length:] = torch.nan
        return {"scores": scores, "seq_lens": maker.ints(seq_lens), "budget": budget, **other}

    def rows(*values: list[float], **other: Any) -> dict[str, Any]:
        """Scores as they are written, a sequence each."""
        scores = torch.tensor(values, dtype=dtype)[:, None].to(device)
        return {"scores": scores, "seq_lens": maker.ints([len(row) for row in values]), "budget": 3, **other}

    nan, inf = torch.nan, torch.inf
    lengths = [9, 4, 12]
    yield "plain", call(lengths)
    yield "one set for all heads", call(lengths, sets=1)
    yield "sinks and recent", call(lengths, num_sinks=2, num_recent=3)
    yield "only sinks and recent", call(lengths, num_sinks=2, num_recent=4)
    yield "sinks and recent meet", call([5, 3, 6], num_sinks=3, num_recent=3)
    yield "budget of each", call(lengths, num_recent=1, budgets=maker.ints([5, 2, 6]))
    yield "budget 0", call(lengths, budget=0)
    yield "budget past every length", call(lengths, budget=20)
    yield "empty sequence", call([0, 7, 0])
    yield "no tokens", call([0, 0])
    yield "empty batch", call([])
    yield "average of 5", call(lengths, num_recent=2, pooling="avg", kernel=5)
    yield "average of more than there are", call(lengths, num_recent=2, pooling="avg", kernel=15)
    yield "maximum of 3", call(lengths, num_sinks=1, num_recent=2, pooling="max", kernel=3)
    yield "ties", rows([1.0, 2.0, 2.0, 2.0, 2.0], [0.0, -0.0, 0.0, -0.0, 0.0], [5.0, 5.0, 5.0, 5.0, 9.0])
    yield "NaN and infinities", rows([nan, 1.0, -nan, 2.0, 3.0], [nan] * 5, [-inf, inf, inf, -1.0, -inf])
    yield "NaN at the ends", rows([nan, 1.0, 2.0, 3.0, nan], num_sinks=1, num_recent=1)
    yield "NaN and average", rows([nan, 3.0, 1.0, -inf, 4.0, 2.0, 2.5], pooling="avg", kernel=3)
    yield "NaN and maximum", rows([nan, -3.0, -1.0, -inf, -4.0, -2.0, 2.5], pooling="max", kernel=3)
    wide = call(lengths)
    yield "strided scores", wide | dict(scores=maker.randn(3, 13, 4).transpose(1, 2)[:, ::2])
    yield "expanded scores", wide | dict(scores=wide["scores"][:1, :1].expand(3, 4, -1))
    yield "production", call([1024, 700], sets=8, budget=256, num_recent=32, pooling="avg", kernel=5)
