"""The measuring of selection and sparse attention: that peers do the same work, and that every case runs."""

from __future__ import annotations

import pytest
import torch

from kvbackend import backends, use
from kvbackend.bench import sparse
from kvbackend.ops import registry
from kvbackend.ops._samples import Maker

pytestmark = pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(sparse, "CONTEXTS", (512, 640))
    monkeypatch.setattr(sparse, "TOPK", 128)


def test_every_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"op": [1e3, 2e3, 6e3], "peer": [2e3, 8e3, 2e3]}
    monkeypatch.setattr(sparse, "interleaved", lambda candidates, rounds: {name: times[name] for name in candidates})
    found = sparse.sparse_times(["absorb_q", *sparse.CASES])
    assert {result.op for result in found} == set(sparse.CASES)
    for result in found:
        assert result.median_us == 2e3
        (peer,) = result.peers
        assert (peer["median_us"], peer["ratio"]) == (2e3, 0.5)  # the median of 0.5, 0.25 and 3


@pytest.mark.parametrize("name", ["topk_indices", "indexer_logits", "lightning_indexer"])
def test_peers_find_what_the_op_finds(name: str) -> None:
    with use("cpu"):
        for case in sparse.CASES[name](Maker(torch.device("cpu"), torch.bfloat16)):
            got, want = registry[name](**case.calls[0]), case.run_peer()
            if name == "indexer_logits":
                torch.testing.assert_close(got[0], want.float(), rtol=0.05, atol=0.05 * float(got.max()))
            elif name == "topk_indices":
                assert torch.equal(got, want.indices.sort().values.int())
            else:
                assert torch.equal(got, want.sort().values.int())
