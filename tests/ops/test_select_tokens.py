"""select_tokens' reference against the published definitions, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbackend
from kvbackend.ops import select_tokens
from kvbackend.ops.select_tokens import _pooled  # type: ignore[attr-defined]
from tests.ops.test_accumulate_scores import H2O, SNAPKV

# the golden scores pooled by an average of 3 whose divisor counts the zeros beyond both ends
SNAPKV_POOLED = [0.217004, 0.338652, 0.283582, 0.298723, 0.248373, 0.250518, 0.225501, 0.22443, 0.14485]


def select(rows: list[list[float]], budget: int, seq_lens: list[int] | None = None, **other: Any) -> list[list[int]]:
    """One set for each row of scores; without the -1 of the tail."""
    lengths = torch.tensor(seq_lens or [len(row) for row in rows], dtype=torch.int32)
    kept = select_tokens.reference(torch.tensor(rows)[:, None], lengths, budget, **other)
    assert kept.dtype == torch.int32
    assert kept.shape == (len(rows), 1, budget)
    out = []
    for row in kept[:, 0].tolist():
        used = [position for position in row if position >= 0]
        assert row == used + [-1] * (budget - len(used)), "-1 only at the tail"
        out.append(used)
    return out


def oracle(
    scores: list[float], budget: int, sinks: int, recent: int, pooling: str = "none", kernel: int = 1
) -> list[int]:
    """Pick the best remaining token again and again, the first of equals."""
    total = len(scores)
    forced = {j for j in range(total) if j < sinks or j >= total - recent}
    usable = [not math.isnan(s) and s != -math.inf and j < total - recent for j, s in enumerate(scores)]
    values = list(scores)
    if pooling != "none":
        for j in range(total):
            near = [scores[i] for i in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= i < total and usable[i]]
            values[j] = sum(near) if pooling == "avg" else max(near, default=-math.inf)
    left = [j for j in range(total) if j not in forced and usable[j]]
    kept = set(forced)
    while left and len(kept) < budget:
        best = left[0]
        for j in left:
            if values[j] > values[best]:
                best = j
        left.remove(best)
        kept.add(best)
    return sorted(kept)


def test_snapkv_golden_choice() -> None:
    window = [9.0, 9.0, 9.0]  # the scores of the window must not be pooled into the last earlier token
    assert select([SNAPKV + window], 3 + 3, num_recent=3, pooling="avg", kernel=3) == [[1, 2, 3, 9, 10, 11]]
    pooled = _pooled(torch.tensor([[SNAPKV]]), torch.ones(1, 1, 9, dtype=torch.bool), "avg", 3) / 3
    torch.testing.assert_close(pooled[0, 0], torch.tensor(SNAPKV_POOLED), rtol=0, atol=1e-6)
    assert select([SNAPKV + window], 3 + 3, num_recent=3) == [[0, 2, 4, 9, 10, 11]], "pooling changes this choice"


def test_h2o_golden_choice() -> None:
    assert select([H2O], 3 + 3, num_recent=3) == [[0, 1, 2, 9, 10, 11]]


SCORES = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, 2.0, 0.5, -3.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=12
)


@settings(max_examples=200, deadline=None)
@given(SCORES, st.integers(0, 3), st.integers(0, 3), st.integers(0, 8))
def test_equals_picking_one_token_at_a_time(scores: list[float], sinks: int, recent: int, more: int) -> None:
    budget = sinks + recent + more
    assert select([scores], budget, num_sinks=sinks, num_recent=recent) == [oracle(scores, budget, sinks, recent)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 0.5, -3.0, math.nan, -math.inf]), min_size=1, max_size=12),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 6),
    st.sampled_from(["avg", "max"]),
    st.sampled_from([1, 3, 5, 9]),
)
def test_pooled_equals_picking_one_token_at_a_time(
    scores: list[float], sinks: int, recent: int, more: int, pooling: str, kernel: int
) -> None:
    budget = sinks + recent + more
    got = select([scores], budget, num_sinks=sinks, num_recent=recent, pooling=pooling, kernel=kernel)
    assert got == [oracle(scores, budget, sinks, recent, pooling, kernel)]


def test_what_stands_beyond_a_sequence_is_not_looked_at() -> None:
    assert select([[1.0, 2.0, 3.0, math.nan, 99.0]], 2, [3]) == [[1, 2]]
    assert select([[1.0, 2.0, 3.0, 50.0, 50.0]], 2, [3], pooling="avg", kernel=3) == [[1, 2]]
    assert select([[1.0, 2.0]], 5, [0]) == [[]]


def test_a_budget_for_each_sequence() -> None:
    budgets = torch.tensor([1, 3], dtype=torch.int32)
    assert select([[1.0, 5.0, 2.0, 3.0]] * 2, 3, budgets=budgets) == [[1], [1, 2, 3]]


def test_ties_are_broken_alike_in_every_run_and_place() -> None:
    scores = torch.zeros(1, 1, 4096)
    lengths = torch.tensor([4096], dtype=torch.int32)
    for copies in (1, 5):
        kept = select_tokens.reference(scores.expand(copies, 3, -1), lengths.expand(copies), 100)
        assert (kept == torch.arange(100, dtype=torch.int32)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 4}, "budget is 4; it must be at least 2 sinks plus 3 recent tokens, which are always kept: raise"),
        ({"num_sinks": -1}, "num_sinks is -1; it must be 0 or more"),
        ({"kernel": 4}, "kernel is 4; a neighbourhood .* odd: pass"),
        ({"kernel": 0}, "kernel is 0"),
        ({"pooling": "mean"}, "pooling is 'mean'; it must be none, avg or max"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    arguments = dict(
        scores=torch.zeros(1, 1, 9), seq_lens=torch.tensor([9], dtype=torch.int32), budget=6, num_sinks=2, num_recent=3
    )
    with kvbackend.use("reference"), pytest.raises(kvbackend.ArgumentError, match=message):
        select_tokens(**arguments | change)


def test_values_are_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    with kvbackend.use("reference"):
        with pytest.raises(kvbackend.ArgumentError, match=r"seq_lens holds length 10 at index 0"):
            select_tokens(torch.zeros(1, 1, 9), torch.tensor([10], dtype=torch.int32), 3)
        with pytest.raises(kvbackend.ArgumentError, match=r"budgets holds budget 1 at index 0; it must be in \[2, 4\)"):
            select_tokens(
                torch.zeros(1, 1, 9), torch.tensor([9], dtype=torch.int32), 3, num_recent=2,
                budgets=torch.tensor([1], dtype=torch.int32),
            )  # fmt: skip
