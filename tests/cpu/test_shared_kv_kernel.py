"""What the CPU kernel of shared_kv_attention promises beyond the contract: no foreign memory, no batch mates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbackend import UnsupportedError, backends, use
from kvbackend.ops import shared_kv_attention

pytestmark = pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)

FAR = (1 << 31) - 1
SAMPLES = dict(shared_kv_attention.make_samples("cpu", torch.float32))


@pytest.fixture(autouse=True)
def _only_the_cpu_kernels():
    with use("cpu"):
        yield


def one_of_batch(call: dict[str, Any], index: int) -> dict[str, Any]:
    """The call of one sequence of a batch."""
    start, end = call["cu_seqlens_q"][index : index + 2].tolist()
    own = {name: call[name][start:end] for name in ("q", "kv", "topk_indices") if call.get(name) is not None}
    own |= {name: call[name][index : index + 1] for name in ("window_table", "block_table") if name in call}
    lengths = dict(seq_lens=call["seq_lens"][index : index + 1], cu_seqlens_q=torch.tensor([0, end - start]).int())
    return call | own | lengths


@pytest.mark.parametrize("name", ["mixed", "all entries", "v41_fp8_528 and v41_fp4_288", "production"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_alone(name, dtype):
    call = dict(shared_kv_attention.make_samples("cpu", dtype))[name]
    out, lse = shared_kv_attention(**call)
    for index in range(len(call["seq_lens"])):
        start, end = call["cu_seqlens_q"][index : index + 2].tolist()
        alone, alone_lse = shared_kv_attention(**one_of_batch(call, index))
        assert torch.equal(alone, out[start:end])
        assert torch.equal(alone_lse, lse[start:end])


@pytest.mark.parametrize("block", [-1, -2, 1 << 20, FAR, -FAR])
@pytest.mark.parametrize("table", ["block_table", "window_table"])
@pytest.mark.parametrize("name", ["mixed", "v4_fp8_584 and v4_fp8_584"])
def test_blocks_that_are_not_there_hold_nothing(name, table, block):
    call = SAMPLES[name]
    ids = call[table].clone()
    ids[:, 0] = block
    gone = ids.clone()
    gone[:, 0] = -1
    want = shared_kv_attention.reference(**shared_kv_attention.bind((), call | {table: gone}))
    got = shared_kv_attention(**call | {table: ids})
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entry", [-7, 1 << 20, FAR, -FAR - 1])
def test_entries_that_are_not_there_are_none(entry):
    call = SAMPLES["mixed"]
    strange = call["topk_indices"].clone()
    strange[:, 1] = entry
    none = strange.clone()
    none[:, 1] = -1
    got, want = (shared_kv_attention(**call | dict(topk_indices=indices)) for indices in (strange, none))
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize(
    "change", [dict(seq_lens=FAR), dict(seq_lens=-5), dict(max_seqlen_q=0), dict(cu_seqlens_q=FAR)]
)
def test_lengths_that_cannot_be_stay_within_the_call(change):
    call = dict(SAMPLES["window only"])
    for name, value in change.items():
        if name == "max_seqlen_q":
            call[name] = value
        else:
            call[name] = call[name].clone()
            call[name][-1] = value
    out, _ = shared_kv_attention(**call)
    assert out.shape == call["q"].shape


def test_pages_of_strided_bytes_are_refused():
    call = SAMPLES["v4_fp8_584 and v4_fp8_584"]
    apart = call["window_cache"].T.contiguous().T
    with pytest.raises(UnsupportedError, match=r"window_cache has bytes \d+ apart"):
        shared_kv_attention(**call | dict(window_cache=apart))
