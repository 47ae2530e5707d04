"""Which tokens of a sequence are kept: both ends, and the best between them."""

import triton
import triton.language as tl

from .topk_indices import kth_highest, taken_of


@triton.jit
def pool_scores(
    scores, score_b, score_h, score_n, seq_lens, seq_stride, out, num_sets, width, num_recent, kernel,
    AVERAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [B, Hs, S] float32, dense: sum or maximum of each neighbourhood, -inf at scores that are not selected.

    Neighbours are added in the order of their positions. Program: (row of scores, tile of it).
    """
    row = tl.program_id(0).to(tl.int64)
    b, h = row // num_sets, row % num_sets
    earlier = tl.minimum(tl.load(seq_lens + b * seq_stride), width) - num_recent
    scores += b * score_b + h * score_h
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(scores + n.to(tl.int64) * score_n, mask=n < earlier, other=float("-inf")).to(tl.float32)
    empty = 0.0 if AVERAGE else float("-inf")
    pooled = tl.full((BLOCK,), empty, tl.float32)
    for shift in range(kernel):
        at = n + shift - kernel // 2
        there = (at >= 0) & (at < earlier)
        score = tl.load(scores + at.to(tl.int64) * score_n, mask=there, other=0.0).to(tl.float32)
        score = tl.where(there & (score > float("-inf")), score, empty)  # NaN compares false
        pooled = pooled + score if AVERAGE else tl.maximum(pooled, score)
    tl.store(out + row * width + n, tl.where(own > float("-inf"), pooled, float("-inf")), mask=n < width)


@triton.jit
def select_tokens(
    scores, score_b, score_h, score_n, seq_lens, seq_stride, budgets, budget_stride, out, num_sets, width, budget,
    num_sinks, num_recent, HAS_BUDGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [B, Hs, budget], -1 before, = positions of the kept tokens, ascending. Program: one row of scores."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // num_sets, row % num_sets
    length = tl.minimum(tl.load(seq_lens + b * seq_stride), width)
    last = length - num_recent  # where the recent ones begin
    total = budget
    if HAS_BUDGETS:
        total = tl.minimum(tl.load(budgets + b * budget_stride), budget)
    forced = length - tl.maximum(last - num_sinks, 0)
    scores += b * score_b + h * score_h
    threshold, wanted = kth_highest(scores, score_n, num_sinks, last, tl.maximum(total - forced, 0), BLOCK)
    taken, ties = 0, 0
    for first in range(0, length, BLOCK):
        n = first + tl.arange(0, BLOCK)
        between = (n >= num_sinks) & (n < last)
        score = tl.load(scores + n.to(tl.int64) * score_n, mask=between, other=0.0).to(tl.float32)
        take, ties = taken_of(score, between, threshold, wanted, ties)
        take = tl.where(between, take, (n < length).to(tl.int32))
        place = taken + tl.cumsum(take, axis=0) - 1
        tl.store(out + row * budget + place, n, mask=(take > 0) & (place < budget))
        taken += tl.sum(take, axis=0)
