"""Graphs and NZ pages, as the check for a machine with an NPU tries them; and that it would notice mistakes."""

from __future__ import annotations

import pytest
import torch

from tests.npu import cases, judge
from tests.npu.device import fractals, graphs


def test_every_replay_equals_the_call_itself(fake_npu) -> None:
    found = dict(graphs.faults())
    taken = {
        op for op in judge.ADAPTED if any(not judge.reasons(op, args) for _, args in cases.every(op, torch.bfloat16))
    }
    assert set(found) == taken - set(graphs.WITHOUT_A_GRAPH)
    assert not any(found.values()), found
    assert not fake_npu.problems


def test_pages_in_nz_are_those_that_transcode_makes(fake_npu) -> None:
    assert dict(fractals.faults()) == {"rows written in NZ": "", "attention over NZ pages": ""}
    assert not fake_npu.problems


@pytest.mark.parametrize("op", ["reshape_and_cache", "sparse_mla_attention", "mla_attention"])
def test_a_graph_that_is_not_replayed_is_noticed(op, monkeypatch) -> None:
    monkeypatch.setattr(torch.npu.NPUGraph, "replay", lambda graph: None)
    monkeypatch.setattr(judge, "ADAPTED", [op])
    assert all(dict(graphs.faults()).values())


@pytest.mark.parametrize("op", graphs.ON_THE_HOST)
@pytest.mark.parametrize("kept", [[19, 9], [12, 4]], ids=["lengths of the capture", "other lengths"])
def test_lengths_that_the_graph_is_not_told_are_noticed(op, kept, monkeypatch) -> None:
    update = torch.npu.NPUGraph.update

    def mistaken(graph, cpu_update_input) -> None:
        update(graph, [told | dict(actual_seq_kvlen=kept) for told in cpu_update_input])

    monkeypatch.setattr(torch.npu.NPUGraph, "update", mistaken)
    assert "differs from the call itself" in graphs.of_host_lengths(op)


def test_another_order_of_fractals_is_noticed(monkeypatch) -> None:
    """Rows before fractals, as a plain page has them."""
    transcode = fractals.transcode

    def mistaken(cache, from_layout, to_layout, block_size):
        if to_layout != "NZ":
            return transcode(cache, from_layout, to_layout, block_size)
        found = transcode(cache, from_layout, to_layout, block_size)
        return tuple(pages.permute(0, 1, 3, 2, 4).reshape(pages.shape) for pages in found)

    monkeypatch.setattr(fractals, "transcode", mistaken)
    assert all(dict(fractals.faults()).values())
