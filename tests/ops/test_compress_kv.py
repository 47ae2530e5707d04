"""compress_kv against golden numbers, against a token-by-token compressor, and against itself in other chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError, use
from kvbackend.ops import compress_kv
from kvbackend.rope import Yarn, cos_sin_table
from tests.golden import wave

EXACT = dict(rtol=0, atol=5e-9)  # the golden numbers have 8 digits
TABLE = cos_sin_table(64, 4, 1.6e5, Yarn(16, 64, mscale_all_dim=1.0), dtype=torch.float64)

# the three compressors of DeepSeek-V4 and V4.1, small
KINDS = {
    "CSA": dict(compress_ratio=4, overlap=True, eps=1e-6),
    "HCA": dict(compress_ratio=6, overlap=False, eps=1e-6),
    "CSA2": dict(compress_ratio=2, overlap=False, eps=1e-20),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def reference(**arguments: Any) -> Any:
    return compress_kv.reference(**compress_kv.bind((), arguments))


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(kind: str, tokens: int, dim: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Everything of one sequence but its lengths and state."""
    options = KINDS[kind]
    width = dim * (2 if options["overlap"] else 1)
    bias = None if kind == "CSA2" else draw(7, options["compress_ratio"], width, dtype=dtype)
    rows = dict(kv=draw(seed, tokens, width, dtype=dtype), gate=draw(seed + 1, tokens, width, dtype=dtype))
    weight = 1 + 0.1 * draw(8, dim, dtype=dtype)
    return dict(rows, norm_weight=weight, position_bias=bias, cos_sin=TABLE.to(dtype), **options)


def new_state(call: dict[str, Any], count: int = 1, spare: int = 0) -> torch.Tensor:
    span = call["compress_ratio"] * (2 if call["overlap"] else 1)
    shape = count, span - 1 + spare, 2 * call["kv"].shape[1]
    return torch.full(shape, torch.nan, dtype=torch.promote_types(call["kv"].dtype, torch.float32))


def run(call: dict[str, Any], start: int, end: int, state: torch.Tensor, slot: int = 0) -> Any:
    """Tokens start to end of the sequence in `call`."""
    part = {name: call[name][start:end] for name in ("kv", "gate")}
    lengths = torch.tensor([end], dtype=torch.int32), torch.tensor([0, end - start], dtype=torch.int32)
    slots = torch.tensor([slot], dtype=torch.int32)
    return reference(**call | part, seq_lens=lengths[0], cu_seqlens_q=lengths[1], state=state, state_slots=slots)


def in_chunks(call: dict[str, Any], cuts: list[int], state: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    rows, positions, start = [], [], 0
    for end in [*cuts, len(call["kv"])]:
        out, position, _ = run(call, start, end, state)
        used = position >= 0
        assert (out[~used] == 0).all()
        rows.append(out[used])
        positions += position[used].tolist()
        start = end
    return torch.cat(rows), positions


def whole(call: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    return in_chunks(call, [], new_state(call))


@pytest.mark.parametrize(
    ("ratio", "overlap", "eps", "entry", "golden"),
    [
        (
            4, True, 1e-6, 0,
            [-0.06622749, -0.38140365, -0.84344658, -1.31012264, -1.53881531, -0.48879589, 0.9788039, 1.50060545],
        ),
        (
            4, True, 1e-6, 1,
            [1.48229525, 1.31194256, 1.17720046, 0.94005624, -0.01250382, -0.91988647, 0.2431496, 0.08381728],
        ),
        (
            4, False, 1e-6, 1,
            [-0.88351106, -1.09889655, -1.08675119, -0.36292731, 0.45182201, -1.14914421, 1.29171808, 1.21446401],
        ),
        (
            2, False, 1e-20, 3,
            [-0.93235918, -1.17494265, -1.24102385, -1.05601001, -0.47862409, 0.31990681, 0.8417155, 1.24362782],
        ),
    ],
)  # fmt: skip
def test_golden(ratio, overlap, eps, entry, golden):
    width = 16 if overlap else 8
    hidden = wave(0.1, 11, 8)
    call = dict(
        kv=hidden @ wave(1, width, 8).T,
        gate=hidden @ wave(2, width, 8).T,
        position_bias=wave(3, ratio, width) if ratio == 4 else None,
        norm_weight=1 + 0.1 * wave(4, 8),
        cos_sin=TABLE, compress_ratio=ratio, overlap=overlap, eps=eps,
    )  # fmt: skip
    rows, positions = whole(call)
    assert positions == [ratio * i for i in range(11 // ratio)]
    assert_close(rows[entry], torch.tensor(golden, dtype=torch.float64), **EXACT)


def test_golden_of_two_channels():
    call = dict(
        kv=torch.tensor([[1.0, 2.0], [3.0, -2.0]]), gate=torch.tensor([[0.0, 1.0], [1.0, 1.0]]),
        norm_weight=torch.ones(2), compress_ratio=2, eps=1e-20,
        seq_lens=torch.tensor([2], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
    )  # fmt: skip
    assert_close(reference(**call)[0][0], torch.tensor([1.4142135, 0.0]), rtol=1e-7, atol=1e-7)
    unnormed = reference(**call | dict(eps=1e30))[0][0] * 1e15  # so large an eps leaves the pooled row
    assert_close(unnormed, torch.tensor([2.4621172, 0.0]), rtol=1e-6, atol=1e-7)


@EVERY_KIND
def test_equals_a_compressor_that_takes_one_token_at_a_time(kind):
    call = inputs(kind, 29)
    rows, positions = whole(call)
    compress_ratio, dim, overlap = call["compress_ratio"], 8, call["overlap"]
    want, open_group, before = [], [], None
    for token, (kv, gate) in enumerate(zip(call["kv"], call["gate"], strict=True)):
        if call["position_bias"] is not None:
            gate = gate + call["position_bias"][token % compress_ratio]
        open_group.append((kv, gate))
        if len(open_group) < compress_ratio:
            continue
        pooled = [(kv[-dim:], gate[-dim:]) for kv, gate in open_group]
        if overlap and before:
            pooled += [(kv[:dim], gate[:dim]) for kv, gate in before]
        weights = torch.stack([gate for _, gate in pooled]).softmax(0)
        row = sum(w * kv for w, (kv, _) in zip(weights, pooled, strict=True))
        row = row / (row.square().mean() + call["eps"]).sqrt() * call["norm_weight"]
        angles = TABLE[token + 1 - compress_ratio]
        for pair in range(2):
            cos, sin, even, odd = angles[pair], angles[2 + pair], row[4 + 2 * pair].clone(), row[5 + 2 * pair].clone()
            row[4 + 2 * pair], row[5 + 2 * pair] = even * cos - odd * sin, even * sin + odd * cos
        want.append(row)
        before, open_group = open_group, []
    assert positions == [compress_ratio * i for i in range(29 // compress_ratio)]
    assert_close(rows, torch.stack(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@EVERY_KIND
def test_any_chunks_give_the_same_bits(kind, dtype):
    call = inputs(kind, 61, dim=24, dtype=dtype)
    call["cos_sin"] = TABLE.to(torch.promote_types(dtype, torch.float32))
    rows, positions = whole(call)
    every_token = list(range(1, 61))
    for cuts in ([1], [30], [31], [7, 12, 21], [3, 4, 5, 6, 40], [12, 24, 36, 48], every_token):
        got, got_positions = in_chunks(call, cuts, new_state(call))
        assert torch.equal(got, rows), cuts
        assert got_positions == positions


@EVERY_KIND
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 1025, 1026])
def test_lengths_around_groups_windows_and_tiles(kind, tokens):
    """After 0, or an odd or even number of tokens: the next call's rows are the whole text's."""
    call = inputs(kind, tokens) | dict(cos_sin=cos_sin_table(1100, 4, 1e4, dtype=torch.float64))
    rows, positions = whole(call)
    assert positions == list(
        range(0, tokens // call["compress_ratio"] * call["compress_ratio"], call["compress_ratio"])
    )
    for start in {tokens // 2, tokens // 2 + 1, tokens - 1} - {tokens}:
        got, got_positions = in_chunks(call, [start], new_state(call))
        assert torch.equal(got, rows), start
        assert got_positions == positions


@EVERY_KIND
def test_a_batch_is_its_sequences_alone_in_any_order(kind):
    """Also the packing: sequences in order, entries in order, the rest unused at the end."""
    spans = [(0, 13), (5, 6), (0, 0), (11, 12), (3, 20), (7, 10)]
    calls = [inputs(kind, 20, seed=10 * i) for i in range(len(spans))]
    alone, states = [], []
    for call, (start, end) in zip(calls, spans, strict=True):
        state = new_state(call)
        run(call, 0, start, state)
        states.append(state.clone())
        alone.append((*run(call, start, end, state), state))
    for order in ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1]):
        state = torch.cat([new_state(calls[0]), *states[::-1]])  # request i has state 6 - i
        out, positions, _ = reference(
            **calls[0]
            | {name: torch.cat([calls[i][name][slice(*spans[i])] for i in order]) for name in ("kv", "gate")},
            seq_lens=torch.tensor([spans[i][1] for i in order], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0] + [spans[i][1] - spans[i][0] for i in order]).cumsum(0).int(),
            state=state,
            state_slots=torch.tensor([6 - i for i in order]),
        )
        used = torch.cat([alone[i][0][alone[i][1] >= 0] for i in order])
        assert torch.equal(out[: len(used)], used)
        assert (out[len(used) :] == 0).all()
        want = [p for i in order for p in alone[i][1].tolist() if p >= 0]
        assert positions.tolist() == want + [-1] * (len(out) - len(want))
        for i in order:
            assert_close(state[6 - i], alone[i][3][0], rtol=0, atol=0, equal_nan=True)
        assert state[0].isnan().all()


@EVERY_KIND
@pytest.mark.parametrize("rejected", [1, 2, 3, 5])
def test_rejected_tokens_are_taken_back_by_passing_the_shorter_length(kind, rejected):
    """At any position, whether or not the rejected tokens closed a group, if the ring is long enough by as many."""
    call = inputs(kind, 40)
    rows, _ = whole(call)
    for start in range(1, 34):
        state = new_state(call, spare=rejected)
        before, _ = in_chunks(call | {name: call[name][:start] for name in ("kv", "gate")}, [], state)
        other = {name: torch.cat((call[name][:start], draw(99, 6, call[name].shape[1]))) for name in ("kv", "gate")}
        run(call | other, start, start + rejected, state)  # drafts, all rejected
        after, after_positions, _ = run(call, start, 40, state)
        after = after[after_positions >= 0]
        assert torch.equal(torch.cat((before, after)), rows), start


@EVERY_KIND
def test_one_row_too_few_in_the_ring_would_show(kind):
    """The bound on the ring is sharp: the oldest row that rollback needs is the one that a shorter ring lost."""
    call = inputs(kind, 40)
    rows, _ = whole(call)
    wrong = 0
    for start in range(12, 30):
        state = new_state(call, spare=2)
        run(call, 0, start, state)
        run(call, start, start + 3, state)  # three drafts on a ring for two
        after, positions, _ = run(call, start, 40, state)
        after = after[positions >= 0]
        wrong += not torch.equal(after, rows[-len(after) :])
    assert wrong


def test_ratio_one_normalizes_and_rotates_each_token():
    call = dict(
        kv=draw(0, 5, 8), norm_weight=draw(1, 8), compress_ratio=1, eps=1e-20,
        seq_lens=torch.tensor([9], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32),
    )  # fmt: skip
    rows, positions, slots = reference(**call)
    assert positions.tolist() == [4, 5, 6, 7, 8]
    assert slots.numel() == 0
    want = call["kv"] / call["kv"].square().mean(-1, keepdim=True).sqrt() * call["norm_weight"]
    assert_close(rows, want, rtol=1e-12, atol=1e-12)
    rotated, _, _ = reference(**call, cos_sin=TABLE)
    assert torch.equal(rotated[:, :4], rows[:, :4])
    lengths = rotated[:, 4:].unflatten(-1, (2, 2)).norm(dim=-1)
    assert_close(lengths, rows[:, 4:].unflatten(-1, (2, 2)).norm(dim=-1), rtol=1e-12, atol=1e-12)


def test_a_row_of_zeros_stays_zero_with_the_smallest_eps():
    call = inputs("CSA2", 4, dtype=torch.float32)
    rows, _ = whole(call | dict(kv=call["kv"] * 0))
    assert (rows == 0).all()


def test_equal_gates_are_a_mean_and_a_huge_gate_chooses():
    call = inputs("HCA", 6)
    plain = call | dict(cos_sin=None, position_bias=None, norm_weight=torch.ones(8, dtype=torch.float64), eps=0.0)
    mean = call["kv"].mean(0)
    rows, _ = whole(plain | dict(gate=torch.full_like(call["gate"], 3.0)))
    assert_close(rows[0], mean / mean.square().mean().sqrt(), rtol=1e-12, atol=1e-12)
    chosen = torch.zeros_like(call["gate"])
    chosen[2] = 1e4
    rows, _ = whole(plain | dict(gate=chosen))
    assert_close(rows[0], call["kv"][2] / call["kv"][2].square().mean().sqrt(), rtol=1e-12, atol=1e-12)


def test_slots_of_a_pool():
    call = inputs("CSA2", 11)
    state = new_state(call, 2)
    run(call, 0, 3, state, 1)
    table = torch.tensor([[7, 2, -1]], dtype=torch.int32)
    part = {name: call[name][3:] for name in ("kv", "gate")}
    _, positions, slots = reference(
        **call | part, seq_lens=torch.tensor([11], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, 8]).int(),
        state=state, state_slots=torch.tensor([1]), block_table=table, block_size=2,
    )  # fmt: skip
    assert positions.tolist() == [2, 4, 6, 8, -1]
    assert slots.tolist() == [7 * 2 + 1, 2 * 2, 2 * 2 + 1, -1, -1]  # entries 1, 2, 3 and 4, which is in no block


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(compress_ratio=0), "compress_ratio is 0; it must be 1 or more"),
        (dict(overlap=False), "kv has 16 channels; it must have 8, 1 times the 8 of norm_weight"),
        (dict(gate=None), "gate is None with compress_ratio 4"),
        (dict(gate=torch.zeros(9, 16).half()), "gate is torch.float16 but kv is torch.float32"),
        (dict(position_bias=torch.zeros(3, 16)), "position_bias has 3 rows; it must have one for each of the 4"),
        (dict(state=None), "only state_slots is given"),
        (dict(state_slots=None), "only state is given"),
        (dict(state=torch.full((1, 6, 32), torch.nan)), "state has a ring of 6 rows; it must have at least 7"),
        (dict(state=torch.full((1, 7, 31), torch.nan)), "state has rows of 31 numbers; it must have 32"),
        (dict(state=torch.full((1, 7, 32), torch.nan).double()), "state is torch.float64; for kv in torch.float32"),
        (dict(block_table=torch.zeros(1, 2).int()), "block_table is given with block_size -1"),
        (dict(block_size=4), "block_table is None with block_size 4"),
        (dict(cos_sin=torch.zeros(9, 10)), "cos_sin rotates 10 dims but rows have 8"),
        (dict(cos_sin=torch.zeros(9, 3)), "cos_sin rotates 3 dims; .*even"),
        (dict(eps=-1.0), "eps is -1.0; it must be 0 or more"),
        (dict(cu_seqlens_q=torch.tensor([1, 9]).int()), "cu_seqlens_q starts with 1"),
    ],
)
def test_refuses_before_any_write(change, message):
    call = inputs("CSA", 9, dtype=torch.float32)
    call |= dict(
        seq_lens=torch.tensor([9]).int(), cu_seqlens_q=torch.tensor([0, 9]).int(),
        state=new_state(call), state_slots=torch.tensor([0]),
    ) | change  # fmt: skip
    with use("reference", ops="compress_kv"), pytest.raises(ArgumentError, match=message):
        compress_kv(**call)
    assert call["state"] is None or call["state"].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(state_slots=torch.tensor([1])), r"state_slots holds state 1 at index 0; it must be in \[-1, 1\)"),
        (dict(seq_lens=torch.tensor([8]).int()), "cu_seqlens_q names up to 1 more query tokens than seq_lens counts"),
        (dict(cu_seqlens_q=torch.tensor([0, 10]).int()), "cu_seqlens_q ends with 10 but there are 9 tokens"),
        (
            dict(cos_sin=torch.zeros(4, 4)),
            r"seq_lens holds length 9 at index 0; it must be in \[0, 8\); cos_sin has no",
        ),
    ],
)
def test_values(change, message, monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    call = inputs("CSA", 9, dtype=torch.float32)
    call |= dict(
        seq_lens=torch.tensor([9]).int(), cu_seqlens_q=torch.tensor([0, 9]).int(),
        state=new_state(call), state_slots=torch.tensor([0]),
    ) | change  # fmt: skip
    with use("reference", ops="compress_kv"), pytest.raises(ArgumentError, match=message):
        compress_kv(**call)
    assert call["state"].isnan().all()
