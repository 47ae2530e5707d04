"""Every workload runs, and what stands beside an op does the same work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvbackend import use
from kvbackend.bench import attention
from kvbackend.bench.timing import Case, _differences
from kvbackend.bench.workloads import WORKLOADS, cases
from kvbackend.ops import registry

SIZES = ((1, 40), (3, 100), (1, 64), (2, 17))


def small_cases(name: str) -> Iterator[Case]:
    if name == "paged_attention":
        return attention.gqa(attention.Maker(torch.device("cpu"), torch.bfloat16), others=False, sizes=SIZES)
    if name == "mla_attention":
        return attention.mla(attention.Maker(torch.device("cpu"), torch.bfloat16), others=False, sizes=SIZES)
    return cases([name])


@pytest.mark.parametrize("name", WORKLOADS)
def test_cases_run_beside_peers_that_agree(name: str) -> None:
    compared = 0
    with use("cpu"):
        for case in small_cases(name):
            assert case.op == name
            for call in case.calls:
                registry[name](**call)
            for peer, apart in _differences(case).items():
                compared += 1
                assert apart < 0.02, (case.case, peer)
    assert compared or name not in ("paged_attention", "mla_attention", "indexer_logits")


def test_peers_write_what_the_op_writes() -> None:
    for name, targets in {
        "reshape_and_cache": ("key_cache", "value_cache"),
        "concat_and_cache_mla": ("ckv_cache",),
    }.items():
        for case in cases([name]):
            if case.kv_format != "auto":
                continue
            call = case.calls[0]
            written = []
            for run in (lambda call, name=name: registry[name](**call), *case.peers.values()):
                for target in targets:
                    call[target].zero_()
                run(call)
                written.append([call[target].clone() for target in targets])
            for others in written[1:]:
                assert all(map(torch.equal, written[0], others))
            assert any(part.any() for part in written[0])


def test_peers_copy_what_the_op_copies() -> None:
    (case,) = cases(["copy_blocks"])
    call = case.calls[0]
    cache, copies = call["cache"], []
    for run in (lambda call: registry["copy_blocks"](**call), *case.peers.values()):
        cache.copy_(torch.arange(len(cache)).view(-1, 1, 1, 1) % 251)
        run(call)
        copies.append(cache.clone())
    assert all(torch.equal(copies[0], other) for other in copies[1:])
    assert not torch.equal(copies[0][:, 0, 0, 0], torch.arange(len(cache)).bfloat16() % 251)


@pytest.mark.parametrize("name", ["topk_indices", "lightning_indexer"])
def test_peers_find_what_the_op_finds(name: str) -> None:
    with use("cpu"):
        for case in cases([name]):
            (peer,) = case.peers.values()
            theirs = peer(case.calls[0])
            theirs = theirs.indices if isinstance(theirs, torch.return_types.topk) else theirs
            assert torch.equal(registry[name](**case.calls[0]).sort().values, theirs.sort().values.int())


def test_ops_without_workloads_are_not_measured() -> None:
    assert not list(cases(["absorb_q"]))
