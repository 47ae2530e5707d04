"""topk_indices against Python's own sort: order, ties, what is never selected."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbackend
from kvbackend.ops import topk_indices

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def select(backend: str, scores: torch.Tensor, k: int, **other) -> torch.Tensor:
    with kvbackend.use(backend, ops="topk_indices"):
        return topk_indices(scores, k, **other)


def sorted_by_python(row: list[float], k: int, order: str) -> list[int]:
    usable = [i for i, score in enumerate(row) if not math.isnan(score) and score != -math.inf]
    best = sorted(usable, key=lambda i: (-row[i], i))[:k]
    if order == "position":
        best.sort()
    return best + [-1] * (k - len(best))


FEW_VALUES = st.sampled_from(
    [0.0, -0.0, 1.0, 1.0000001, -2.5, 1e-45, -1e-45, 3e38, math.inf, -math.inf, math.nan, -math.nan]
)


@BACKENDS
@settings(max_examples=150, deadline=None)
@given(
    st.lists(FEW_VALUES | st.floats(width=32), max_size=50), st.integers(1, 60), st.sampled_from(["score", "position"])
)
def test_equals_a_sort_in_python(backend: str, row: list[float], k: int, order: str) -> None:
    scores = torch.tensor([row], dtype=torch.float32)
    got = select(backend, scores, k, order=order)
    assert got.dtype is torch.int32
    assert got.tolist() == [sorted_by_python(scores[0].tolist(), k, order)]


@BACKENDS
@pytest.mark.parametrize("order", ["score", "position"])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 511, 512, 513, 4097, 20000])
@pytest.mark.parametrize("values", [3, 1 << 30])
def test_sizes_and_ties(backend: str, order: str, n: int, values: int) -> None:
    generator = torch.Generator().manual_seed(n)
    scores = torch.randint(0, values, (2, n), generator=generator).float() - values / 2
    for k in (1, n // 2, n - 1, n, n + 3, 512):
        if k > 0:
            want = [sorted_by_python(row, k, order) for row in scores.tolist()]
            assert select(backend, scores, k, order=order).tolist() == want


ROWS = {
    "rising": [float(i) for i in range(9000)],
    "falling": [-float(i) for i in range(9000)],
    "equal": [0.0] * 9000,
    "NaN": [math.nan] * 9000,
    "NaN and -inf": [math.nan, -math.inf] * 4500,
    "few usable": [math.nan] * 8990 + [1.0] * 10,
    "zeros of both signs": [-0.0, 0.0] * 4500,
    "seven values": [float(i % 7) for i in range(9000)],
    "subnormal": [1e-45 * i for i in range(9000)],
    "infinite": [math.inf] * 5000 + [math.nan] * 4000,
    "a few huge": [1e30 if i % 900 == 0 else float(i % 900) for i in range(9000)],
}


@BACKENDS
@pytest.mark.parametrize("name", ROWS)
def test_shapes_of_rows(backend: str, name: str) -> None:
    scores = torch.tensor([ROWS[name]])
    for order in ("score", "position"):
        want = sorted_by_python(scores[0].tolist(), 2048, order)
        assert select(backend, scores, 2048, order=order)[0].tolist() == want


@BACKENDS
def test_golden(backend: str) -> None:
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.9, 0.2, 0.5, 0.7, 0.6, 0.05, -0.2]]).expand(2, -1)
    got = select(backend, scores, 4, lengths=torch.tensor([9, 3], dtype=torch.int32), order="position")
    assert got.tolist() == [[1, 3, 6, 7], [0, 1, 2, -1]]


@BACKENDS
def test_a_row_depends_on_itself_alone(backend: str) -> None:
    """Heavy ties: the same rows in any order, alone, and again, give the same positions in the same order."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(0, 5, (12, 6000), generator=generator).float()
    lengths = torch.randint(0, 6001, (12,), generator=generator).int()
    first = select(backend, scores, 700, lengths=lengths)
    for seed in range(10):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(select(backend, scores[order], 700, lengths=lengths[order]), first[order])
        alone = slice(seed, seed + 1)
        assert torch.equal(select(backend, scores[alone], 700, lengths=lengths[alone]), first[alone])
        assert torch.equal(select(backend, scores[alone, : lengths[seed]], 700), first[alone])


@BACKENDS
def test_positions_past_two_to_the_24(backend: str) -> None:
    """float32 holds no odd number past 2^24: an index kept as one would be rounded."""
    n = (1 << 24) + 70
    scores = torch.full((1, n), -1.0, dtype=torch.bfloat16)
    chosen = [3, (1 << 24) + 1, (1 << 24) + 3, n - 1]
    scores[0, chosen] = torch.tensor([1.0, 2.0, 2.0, 1.0], dtype=torch.bfloat16)
    assert select(backend, scores, 4, order="position").tolist() == [chosen]
    assert select(backend, scores, 5).tolist() == [[chosen[1], chosen[2], chosen[0], chosen[3], 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=0), "k is 0; it must be at least 1: pass how many to select"),
        (dict(k=-3), "k is -3; it must be at least 1"),
        (dict(order="ascending"), "order is 'ascending'; it must be score or position"),
        (dict(lengths=torch.zeros(4, dtype=torch.int32)), "lengths.*has T = 4; it must be 3"),
        (dict(lengths=torch.zeros(3)), "lengths is torch.float32; it must be torch.int32"),
    ],
)
@BACKENDS
def test_wrong_calls(backend: str, change: dict, message: str) -> None:
    good = dict(scores=torch.zeros(3, 5), k=2)
    with pytest.raises(kvbackend.ArgumentError, match=message):
        select(backend, **(good | change))


@pytest.mark.parametrize("lengths", [[2, -1, 3], [2, 6, 3]])
@BACKENDS
def test_wrong_lengths_are_found_under_check_and_harmless_otherwise(
    backend: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, wrong = torch.arange(15.0).view(3, 5), torch.tensor(lengths, dtype=torch.int32)
    want = select(backend, scores, 4, lengths=wrong.clamp(0, 5))
    assert torch.equal(select(backend, scores, 4, lengths=wrong), want)
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    with pytest.raises(
        kvbackend.ArgumentError, match=r"lengths holds length (-1|6) at index 1; it must be in \[0, 6\)"
    ):
        select(backend, scores, 4, lengths=wrong)


@pytest.mark.parametrize("k", [True, False])
def test_a_truth_value_is_no_count(k: bool) -> None:
    """torch takes True for 1; a comparison that slipped in would select one column."""
    for call in (lambda: topk_indices(torch.zeros(2, 5), k), lambda: topk_indices(scores=torch.zeros(2, 5), k=k)):
        with pytest.raises(kvbackend.ArgumentError, match=f"k is {k}; it is a number: pass one"):
            call()
