"""Where sparse attention begins to pay: measured, kept, asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbackend
from kvbackend import ArgumentError
from kvbackend.cache import GqaLayer, PagedCache, SparseAttention, Sparsity, crossover
from kvbackend.cache.crossover import Row

SPARSITY = Sparsity(32, sinks=4, recent=16)


@pytest.fixture(autouse=True)
def _reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with kvbackend.use("reference"):
        yield


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([(1024, 10, 5), (2048, 20, 6)], 1024),
        ([(1024, 5, 10), (2048, 20, 10), (4096, 40, 10)], 2048),
        ([(1024, 20, 10), (2048, 5, 10), (4096, 40, 10)], 4096),  # not faster throughout
        ([(1024, 5, 10), (2048, 9, 10)], None),
        ([(1024, 10, 10)], None),
        ([], None),
    ],
)
def test_the_crossover_is_where_sparse_stays_ahead(rows: list[tuple[int, int, int]], first: int | None) -> None:
    assert crossover.crossover([Row(*row, {}) for row in reversed(rows)]) == first


def test_measuring_times_both_on_the_same_tokens() -> None:
    case, rows = crossover.measure(GqaLayer(2, 16), 4, SPARSITY, torch.float32, contexts=(300, 100))
    assert (case.heads, case.kv_heads, case.head_dim, case.dtype, case.topk) == (4, 2, 16, "float32", 32)
    assert [row.context for row in rows] == [100, 300]
    for row in rows:
        assert row.dense_us > 0
        spent = [row.stages_us[stage] for stage in ("index", "top_k", "attention")]
        assert min(spent) > 0
        assert sum(spent) < 2 * row.sparse_us  # each a median of its own
        assert row.stages_us["gather"] == row.stages_us["codec"] == 0  # read in place, and not coded


def test_a_step_is_the_mean_of_those_that_one_choice_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks once for each choice, and once for each step's attention."""
    clock = [0.0]
    monkeypatch.setattr(crossover, "now", lambda device: clock[0])
    for name, method in (("_choose", SparseAttention._choose), ("_attend_one", SparseAttention._attend_one)):

        def ticking(*args: Any, of: Any = method, cost: float = 6e-6 if name == "_choose" else 2e-6) -> Any:
            clock[0] += cost
            return of(*args)

        monkeypatch.setattr(SparseAttention, name, ticking)
    for reselect, want in ((1, 8.0), (4, 3.5), (0, 2.0)):
        _, (row,) = crossover.measure(GqaLayer(2, 16), 4, replace(SPARSITY, reselect=reselect), contexts=(200,))
        assert row.sparse_us == pytest.approx(want)
        assert row.dense_us == pytest.approx(0)


def test_auto_is_dense_below_what_was_measured() -> None:
    cache = PagedCache([GqaLayer(2, 16)], 40, 16, torch.float32)
    case = crossover.Case.of(cache, 0, 4, SPARSITY)
    crossover.save(replace(case, heads=8), [Row(64, 5.0, 1.0, {})])
    assert crossover.dense_below(case)[0] == crossover.UNMEASURED * (32 + 4 + 16)
    assert "not measured on this device" in crossover.dense_below(case)[1]
    crossover.save(case, [Row(100, 5.0, 9.0, {}), Row(200, 5.0, 4.0, {})])
    crossover.save(case, [Row(128, 5.0, 9.0, {}), Row(256, 5.0, 4.0, {})])  # in its place
    assert len(json.loads(crossover.path().read_text())["entries"]) == 2
    assert [name.name for name in crossover.path().parent.iterdir()] == ["crossover.json"]
    sparse = SparseAttention(cache, SPARSITY, dense_below="auto")
    assert sparse.explain(0, 4, 200).startswith("dense: 200 tokens, threshold 256; sparse attention is faster from 256")
    assert sparse.explain(0, 4, 300).startswith("sparse: 300 tokens, threshold 256")
    assert sparse.explain(0, 4, 40) == "dense: a choice of 52 tokens would cover all 40"
    seq = cache.new_sequence()
    for count, chooses in ((200, False), (100, True)):
        keys = torch.randn(count, 2, 16)
        sparse.write(0, [seq], [count], cache.append(seq, count), keys, keys)
        sparse.attend(0, torch.randn(1, 4, 16), [seq], [1], 0.25)
        if chooses:
            assert sparse.chosen(0, seq).shape == (2, 32)
        else:
            with pytest.raises(ArgumentError, match="has no choice"):
                sparse.chosen(0, seq)


def test_what_was_not_faster_is_unknown_beyond_twice_that() -> None:
    cache = PagedCache([GqaLayer(2, 16)], 4, 16, torch.float32)
    case = crossover.Case.of(cache, 0, 4, SPARSITY)
    for contexts, below in (((500, 1000), 2000), ((100, 50), crossover.UNMEASURED * (32 + 4 + 16))):
        crossover.save(case, [Row(context, 5.0, 9.0, {}) for context in contexts])
        sparse = SparseAttention(cache, SPARSITY, "auto")
        reason = rf"threshold {below}; sparse attention is not faster up to {max(contexts)} tokens, measured on .*;"
        for length, mode in ((below - 1, "dense"), (below, "sparse")):
            why = sparse.explain(0, 4, length)
            assert re.match(rf"{mode}: {length} tokens, {reason} beyond that not measured", why), why


def test_a_broken_file() -> None:
    cache = PagedCache([GqaLayer(2, 16)], 4, 16, torch.float32)
    case = crossover.Case.of(cache, 0, 4, SPARSITY)
    crossover.save(case, [Row(100, 9.0, 5.0, {})])
    assert crossover.dense_below(case)[0] == 100
    crossover.path().write_text("{")
    assert crossover.dense_below(case)[0] == crossover.UNMEASURED * (32 + 4 + 16)
    assert "not measured on this device" in crossover.dense_below(case)[1]


def test_a_word_that_is_not_auto() -> None:
    with pytest.raises(ArgumentError, match="dense_below is 'always'"):
        SparseAttention(PagedCache([GqaLayer(2, 16)], 4, 16, torch.float32), SPARSITY, "always")
