"""What the CPU kernel of compress_kv promises beyond the contract: the same bits in any chunks, no foreign memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from kvbackend import UnsupportedError, backends, use
from kvbackend.ops import compress_kv
from kvbackend.rope import cos_sin_table

pytestmark = pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)

TOKENS, FAR = 61, (1 << 31) - 1
KINDS = {"CSA": (4, True), "HCA": (6, False), "CSA2": (2, False)}


@pytest.fixture(autouse=True)
def _only_the_cpu_kernels():
    with use("cpu"):
        yield


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def text(kind: str, dim: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Everything of one sequence but its lengths; channels are not whole vectors."""
    generator = torch.Generator().manual_seed(0)
    ratio, overlap = KINDS[kind]
    width = dim * (1 + overlap)
    rows = torch.randn(2, TOKENS, width, generator=generator).to(dtype)
    return dict(
        kv=rows[0], gate=rows[1] * 3, norm_weight=torch.rand(dim, generator=generator) + 0.5, compress_ratio=ratio,
        overlap=overlap, eps=1e-6, position_bias=torch.randn(ratio, width, generator=generator),
        cos_sin=cos_sin_table(64, 4, 1e4),
    )  # fmt: skip


def state_of(call: dict[str, Any], count: int = 1) -> torch.Tensor:
    span = call["compress_ratio"] * (1 + call["overlap"])
    return torch.full((count, span - 1, 2 * call["kv"].shape[1]), torch.nan)


def in_chunks(call: dict[str, Any], cuts: list[int]) -> torch.Tensor:
    state, rows = state_of(call), []
    for start, end in pairwise([0, *cuts, TOKENS]):
        part = {name: call[name][start:end] for name in ("kv", "gate")}
        lengths = dict(seq_lens=ints(end), cu_seqlens_q=ints(0, end - start))
        out, positions, _ = compress_kv(**call | part, **lengths, state=state, state_slots=ints(0))
        rows.append(out[positions >= 0])
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [5, 77, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_any_chunks_give_the_same_bits(kind, dim, dtype):
    call = text(kind, dim, dtype)
    whole = in_chunks(call, [])
    assert len(whole) == TOKENS // call["compress_ratio"]
    for cuts in ([1], [30], [7, 12, 21], [12, 24, 36, 48], list(range(1, TOKENS))):
        assert torch.equal(in_chunks(call, cuts), whole), cuts


def test_strides_do_not_matter():
    call = text("CSA", 20)
    want = in_chunks(call, [30])
    apart = {name: call[name].T.contiguous().T for name in ("kv", "gate", "position_bias")}
    assert torch.equal(in_chunks(call | apart, [30]), want)


@pytest.mark.parametrize("slot", [-1, -2, 3, FAR, -FAR])
def test_states_that_are_not_there_are_neither_read_nor_written(slot):
    call = text("CSA2", 8)
    part = {name: call[name][:6] for name in ("kv", "gate")}
    state = state_of(call, 9)
    state.fill_(9.0)
    lengths = dict(seq_lens=ints(9), cu_seqlens_q=ints(0, 6))  # token 3 closes a group that a state had opened
    got = compress_kv(**call | part, **lengths, state=state[3:6], state_slots=ints(slot))
    want = compress_kv(**call | part, **lengths, state=state[3:6], state_slots=ints(-1))
    assert torch.equal(got[0], want[0])
    assert (state == 9.0).all()


@pytest.mark.parametrize("change", [dict(seq_lens=ints(FAR)), dict(seq_lens=ints(-5)), dict(cu_seqlens_q=ints(0, FAR))])
def test_lengths_that_cannot_be_stay_within_the_call(change):
    call = text("CSA2", 8)
    part = {name: call[name][:6] for name in ("kv", "gate")}
    lengths = dict(seq_lens=ints(6), cu_seqlens_q=ints(0, 6)) | change
    rows, positions, _ = compress_kv(**call | part, **lengths, state=state_of(call), state_slots=ints(0))
    assert rows.shape == (4, 8)
    assert (rows[positions < 0] == 0).all()


def test_a_state_that_is_strided_in_its_rows_is_refused():
    call = text("HCA", 8)
    state = state_of(call).mT.contiguous().mT
    with pytest.raises(UnsupportedError, match="state is strided in its last dim"):
        compress_kv(**call, seq_lens=ints(TOKENS), cu_seqlens_q=ints(0, TOKENS), state=state, state_slots=ints(0))
