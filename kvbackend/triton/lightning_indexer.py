"""The best keys among those found so far and a tile of new scores."""

import triton
import triton.language as tl

from .indexer_logits import column_keys
from .topk_indices import kth_highest, taken_of


@triton.jit
def keep_best(
    scores, score_t, positions, candidates, candidate_t, candidate_n, candidate_size, best_scores, best_t,
    best_positions, first_column, low, columns, k, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """best_scores [T, k] and best_positions [T, k], by position, -inf and -1 behind: of the columns `low` to
    columns - 1 of scores, the k highest.

    Columns below k are what was kept before, at `positions` [T, k]; the others are column first_column and up of
    indexer_logits, all of them at later positions: so equal scores are taken in the order of columns. Program: one row.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * score_t
    candidates += row * candidate_t
    threshold, wanted = kth_highest(scores, 1, low, columns, k, BLOCK)
    taken, ties = 0, 0
    for first in range(low // BLOCK * BLOCK, columns, BLOCK):
        n = first + tl.arange(0, BLOCK)
        inside = (n >= low) & (n < columns)
        score = tl.load(scores + n, mask=inside, other=0.0)
        before = tl.load(positions + row * k + n, mask=inside & (n < k), other=-1)
        new = column_keys(first_column + n - k, inside & (n >= k), candidates, candidate_n, candidate_size, CANDIDATES)
        take, ties = taken_of(score, inside, threshold, wanted, ties)
        place = taken + tl.cumsum(take, axis=0) - 1
        kept = (take > 0) & (place < k)
        tl.store(best_scores + row * best_t + place, score, mask=kept)
        tl.store(best_positions + row * k + place, tl.where(n < k, before, new), mask=kept)
        taken += tl.sum(take, axis=0)
    for first in range(taken // BLOCK * BLOCK, k, BLOCK):
        n = first + tl.arange(0, BLOCK)
        rest = (n >= taken) & (n < k)
        tl.store(best_scores + row * best_t + n, tl.full((BLOCK,), float("-inf"), tl.float32), mask=rest)
        tl.store(best_positions + row * k + n, tl.full((BLOCK,), -1, tl.int32), mask=rest)
