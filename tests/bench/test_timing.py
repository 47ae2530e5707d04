"""What is made of times: medians, ratios, shares of a limit; and the limits themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvbackend.bench import limits, timing
from kvbackend.bench.limits import Limit
from kvbackend.bench.timing import Case


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an op, a peer and a limit, in three rounds."""
    taken = {"op": [1e3, 2e3, 6e3], "slow": [2e3, 8e3, 2e3], "limit": [1e3, 1e3, 1e3]}
    monkeypatch.setattr(timing, "interleaved", lambda candidates, rounds: {name: taken[name] for name in candidates})


@pytest.mark.usefixtures("times")
def test_medians_are_of_paired_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limit, "of", staticmethod(lambda name: Limit(name, "GB/s", 4e6, lambda: None)))
    scores = torch.randn(1, 64)
    case = Case(
        "topk_indices", "a case", [dict(scores=scores, k=4)], torch.float32, moved_bytes=1_000_000, limit="copy_gbs",
        peers={"slow": lambda call: call["scores"].topk(call["k"])},
    )  # fmt: skip
    (result,) = timing.measured([case])
    assert (result.op, result.case, result.dtype, result.rounds) == ("topk_indices", "a case", "float32", 3)
    assert result.median_us == 2e3
    assert result.gbs == pytest.approx(1e6 / 2e-3 / 1e9)
    assert result.of_limit == pytest.approx(1e6 / 4e6 / 2)  # a quarter of its work, in twice its time
    assert result.to_dict()["ratio_to_best_peer"] == 0.5
    assert result.peers == [{"name": "slow", "median_us": 2e3, "ratio": 0.5, "differs": None}]


@pytest.mark.usefixtures("times")
def test_peers_that_compute_something_else_show_it() -> None:
    call = dict(cache=torch.full((1, 2, 3), 2.0), block_table=torch.tensor([[0]]), num_tokens=2)
    call["cu_seqlens"] = torch.tensor([0, 2], dtype=torch.int32)
    case = Case("gather_cache", "", [call], torch.float32, peers={"slow": lambda call: torch.ones(2, 3)})
    (result,) = timing.measured([case])
    assert result.peers[0]["differs"] == pytest.approx(0.5)


def test_calls_are_taken_in_turn() -> None:
    seen: list[int] = []
    function = timing.in_turn(lambda i: seen.append(i), [dict(i=0), dict(i=1)])
    for _ in range(3):
        function()
    assert seen == [0, 1, 0]


@pytest.mark.parametrize(("seconds", "calls"), [([3e-3, 3e-3, *[1e-4] * 6], 20), ([5e-2], 1), ([1.5e-2] * 2, 1)])
def test_a_sample_is_sized_by_calls_whose_pages_are_there(
    seconds: list[float], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call or two that fault pages in do not make a sample one cold call; and long calls are few."""
    left = iter(seconds)
    monkeypatch.setattr(timing, "_seconds", lambda function, count: next(left))
    assert timing._calls_of_a_sample(lambda: None) == calls
    assert next(left, None) is None


def test_freed_memory_is_kept() -> None:
    """Large tensors that come after a freed one have its pages, under the settings to measure with."""
    code = """
import pathlib, resource, torch
from kvbackend.bench.timing import keep_freed_memory

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def held(tensors):
    before = resident()
    for _ in range(tensors):
        torch.ones(1 << 24)
    return (resident() - before) / (4 << 24)

print(held(5))
keep_freed_memory()
print(held(5))
"""
    settings = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)
    freely, kept = map(float, done.stdout.split())  # tensors' worth of memory that is left afterwards
    assert freely < 0.5
    assert 0.9 < kept < 1.5


def test_limits_are_measured() -> None:
    Limit.of.cache_clear()
    limits._pool.cache_clear()
    found = limits.limits()
    Limit.of.cache_clear()
    limits._pool.cache_clear()
    assert {"copy_gbs", "read_gbs", "paged_read_gbs", "row_read_gbs", "fp32_gflops"} <= set(found)
    assert all(rate > 0 for rate in found.values())


def test_reading_reads_every_row() -> None:
    """The probe returns the sum of what it read: four rows at a time, all of them."""
    probe = limits._probe("kvbackend_probe_read", __import__("ctypes").c_float, 4)
    rows = torch.arange(12 * 32, dtype=torch.float32)
    offsets = torch.tensor([11, 0, 3, 7, 1, 2, 5, 4]) * 128
    wanted = rows.view(12, 32)[[11, 0, 3, 7, 1, 2, 5, 4]].sum()
    assert probe(rows.data_ptr(), offsets.data_ptr(), len(offsets), 128) == wanted


def test_operations_are_counted_for_every_thread() -> None:
    probe = limits._probe("kvbackend_probe_multiply", __import__("ctypes").c_double, 2)
    assert probe(10, 2) == 2 * probe(10, 1) == 4 * probe(5, 1) > 0
