"""Pool the key-value rows of neighbouring tokens into one, with a softmax over the tokens in each channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Index, Int32, need
from ..rope import cos_sin_table
from ..spec import op
from . import _checks, _math
from ._samples import Maker


@op(group="compressing", mutates=("state",))
def compress_kv(
    kv: Float[Tensor, "T width"],
    norm_weight: Float[Tensor, "dim"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    compress_ratio: int,
    eps: float,
    overlap: bool = False,
    gate: Float[Tensor, "T width"] | None = None,
    position_bias: Float[Tensor, "ratio width"] | None = None,
    state: Float[Tensor, "num_states ring state_width"] | None = None,
    state_slots: Index[Tensor, "B"] | None = None,
    cos_sin: Float[Tensor, "P rotary_dim"] | None = None,
    block_table: Index[Tensor, "B max_blocks"] | None = None,
    block_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compress each group of `compress_ratio` tokens to one normalized row, and carry the open group to the next call.

    With m = compress_ratio, entry w of a sequence stands for its tokens at positions w * m to (w + 1) * m - 1, its
    group. In each channel

        row = sum over the tokens p of the entry of  softmax over p (gate[p] + position_bias[p % m])  *  kv[p]
        row = RMSNorm(row; norm_weight, eps), then RoPE of its last rotary_dim dims at position w * m

    Without overlap the tokens of an entry are its group, all channels `dim` wide. With overlap kv and gate are 2 * dim
    wide: a token's second half feeds its own group and its first half the next one, so that an entry pools 2 * m tokens
    (the first one of a sequence only m). An entry comes out in the call that brings the last token of its group. With
    m = 1 nothing is pooled.

    kv             [T, dim], or [T, 2 * dim] with overlap: projections of the call's tokens, which are the last ones of
                   their sequences; any strides. Everything is computed in float32 (float64 where kv is)
    norm_weight    [dim], any float dtype; eps of the norm
    seq_lens       [B] tokens of each sequence, those of this call included; cu_seqlens_q [B+1], as in paged_attention
    compress_ratio tokens of a group
    overlap        whether an entry pools the group before its own too
    gate           as kv; given if and only if compress_ratio > 1
    position_bias  [compress_ratio, dim or 2 * dim], or none: what DeepSeek-V4 calls ape
    state          [num_states, ring, 2 * width] float32 (float64 where kv is), read and written in place. Row p % ring
                   of a request's state holds kv and gate + position_bias of its token p. It needs no initial value, as
                   positions tell what exists. ring is at least span - 1, span being the tokens an entry pools; with
                   span - 1 + S, the S last tokens can be taken back (speculative decoding) by passing the shorter
                   seq_lens in the next call, and nothing else: groups that they closed come out again
    state_slots    [B] the state of each sequence, which belongs to the request and not to its row in the batch; -1: the
                   tokens of the sequence before this call count as absent, and none is kept. Comes with state
    cos_sin        rotates the rows (interleaved pairs, `kvbackend.rope.cos_sin_table`), or none: V4.1 makes its index
                   keys from unrotated rows, and rotates afterwards with apply_rope and `positions`
    block_table, block_size   of a pool of compressed rows, whose block i holds block_size entries, or none

    Returns, packed in order of the batch's sequences and of their entries, with R = min(T, T // m + B) places:
    rows [R, dim] in kv's dtype, 0 where unused; positions [R] int64 of each group's first token, -1 where unused; and
    slots [R] int64 for store_rows, -1 where unused or in no block, empty without block_table.
    The same tokens in other chunks, or beside other sequences, give the same rows to the bit.

    Undefined: two sequences with one state; a sequence whose earlier tokens are neither in its state nor absent.
    Source: DeepSeek-V4 and V4.1 inference code: CSA is ratio 4 with overlap, HCA ratio 128, CSA2 ratio 2 or 1.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    ratio, num_tokens, num_seqs, dim = compress_ratio, kv.shape[0], seq_lens.shape[0], norm_weight.shape[0]
    num_rows, stages = min(num_tokens, num_tokens // ratio + num_seqs), 2 if overlap else 1
    if num_tokens == 0 or num_seqs == 0:
        no_slots = 0 if block_table is None else num_rows
        return kv.new_zeros(num_rows, dim), _no_index(kv, num_rows), _no_index(kv, no_slots)
    dtype = _math.compute_dtype(kv)
    ends, cu_seqlens = seq_lens.long(), cu_seqlens_q.long()
    starts = ends - cu_seqlens.diff()  # [B] position of the call's first token
    first = starts.clamp(min=0) // ratio
    counts = ends // ratio - first  # [B] entries that come out
    cumulated = counts.cumsum(0)
    place = torch.arange(num_rows, device=kv.device)
    used = place < cumulated[-1]
    sequence = torch.searchsorted(cumulated, place, right=True).clamp(max=num_seqs - 1)  # [R]
    entry = first[sequence] + place - (cumulated - counts)[sequence]

    pooled_kv, pooled_gate = [], []
    for stage in range(stages):  # tokens of the group before, if groups overlap, and of the group
        columns = slice(stage * dim, (stage + 1) * dim)
        group = entry - (stages - 1 - stage)
        position = group[:, None] * ratio + torch.arange(ratio, device=kv.device)  # [R, ratio]
        exists = used[:, None] & (position >= 0)
        token = cu_seqlens[sequence, None] + position - starts[sequence, None]
        in_call = position >= starts[sequence, None]
        token = torch.where(in_call, token, 0).clamp(0, num_tokens - 1)
        values = kv[:, columns].to(dtype)[token]  # [R, ratio, dim]
        gates = torch.zeros_like(values) if gate is None else gate[:, columns].to(dtype)[token]
        if position_bias is not None:
            gates = gates + position_bias[:, columns].to(dtype)
        if state is not None and state_slots is not None:
            slot, ring = state_slots.long()[sequence, None], state.shape[1]
            kept = state[slot.clamp(min=0), position % ring]  # [R, ratio, 2 * width]
            earlier_values, earlier_gates = (half[..., columns].to(dtype) for half in kept.chunk(2, -1))
            values = torch.where(in_call[..., None], values, earlier_values)
            gates = torch.where(in_call[..., None], gates, earlier_gates)
            exists = exists & (in_call | (slot >= 0))
        else:
            exists = exists & in_call
        pooled_kv.append(values.masked_fill(~exists[..., None], 0))
        pooled_gate.append(gates.masked_fill(~exists[..., None], -torch.inf))
    values, gates = torch.cat(pooled_kv, 1), torch.cat(pooled_gate, 1)  # [R, stages * ratio, dim]
    weights = (gates - gates.amax(1, keepdim=True)).exp()
    rows = (weights * values).sum(1) / weights.sum(1)
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
    positions = torch.where(used, entry * ratio, -1)
    if cos_sin is not None:
        plain = dim - cos_sin.shape[1]
        turned = _math.rotate_at(rows[:, None, plain:], positions, cos_sin, interleaved=True)[:, 0]
        rows = torch.cat((rows[:, :plain], turned), -1)
    rows = torch.where(used[:, None], rows, 0).to(kv.dtype)

    if state is not None and state_slots is not None and gate is not None:
        _keep(kv, gate, position_bias, state, state_slots, starts, ends, cu_seqlens)
    if block_table is None:
        return rows, positions, _no_index(kv, 0)
    return rows, positions, _slots(block_table, block_size, sequence, entry, used)


def _keep(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    starts: Tensor,
    ends: Tensor,
    cu_seqlens: Tensor,
) -> None:
    """Write the last tokens of each sequence, as many as a ring holds, to its state."""
    num_tokens, ring = kv.shape[0], state.shape[1]
    token = torch.arange(num_tokens, device=kv.device)
    sequence = (torch.searchsorted(cu_seqlens, token, right=True) - 1).clamp(0, len(starts) - 1)
    position = starts[sequence] + token - cu_seqlens[sequence]
    slot = state_slots.long()[sequence]
    stays = (token < cu_seqlens[-1]) & (position >= 0) & (position >= ends[sequence] - ring) & (slot >= 0)
    gate = gate.to(state.dtype)
    if position_bias is not None:
        gate = gate + position_bias.to(state.dtype)[position % position_bias.shape[0]]
    rows = torch.cat((kv.to(state.dtype), gate), -1)
    _math.write_rows(state, torch.where(stays, slot * ring + position % ring, -1), rows)


def _slots(block_table: Tensor, block_size: int, sequence: Tensor, entry: Tensor, used: Tensor) -> Tensor:
    """Where the entries [R] of sequences [R] go in a pool."""
    max_blocks = block_table.shape[1]
    if max_blocks == 0:
        return _no_index(entry, len(entry))
    index = entry // block_size
    inside = used & (index < max_blocks)
    block = block_table.long()[sequence, torch.where(inside, index, 0)]
    return torch.where(inside & (block >= 0), block * block_size + entry % block_size, -1)


def _no_index(like: Tensor, count: int) -> Tensor:
    return torch.full((count,), -1, dtype=torch.int64, device=like.device)


@compress_kv.check
def _(
    kv,
    norm_weight,
    compress_ratio,
    eps,
    overlap,
    gate,
    position_bias,
    state,
    state_slots,
    cos_sin,
    block_table,
    block_size,
    **_,
):
    need(compress_ratio >= 1, f"compress_ratio is {compress_ratio}; it must be 1 or more: pass the tokens of a group")
    need(
        not (overlap and compress_ratio == 1),
        "overlap is True with compress_ratio 1; groups of one token have no neighbours: pass False",
    )
    need(eps >= 0, f"eps is {eps}; it must be 0 or more: pass the model's rms_norm_eps")
    stages = 2 if overlap else 1
    need(
        kv.shape[1] == stages * norm_weight.shape[0],
        f"kv has {kv.shape[1]} channels; it must have {stages * norm_weight.shape[0]}, {stages} times the "
        f"{norm_weight.shape[0]} of norm_weight{' with overlap' if overlap else ''}: pass this model's projection",
    )
    need(
        (gate is None) == bool(compress_ratio == 1),
        f"gate is {'None' if gate is None else 'given'} with compress_ratio {compress_ratio}; a group of several has "
        f"one and a group of one none: {'pass it' if gate is None else 'drop it'}",
    )
    if gate is not None:
        _checks.same_dtype("kv", kv, gate=gate)
    need(
        position_bias is None or gate is not None,
        "position_bias is given without gate; it is added to gates: drop it",
    )
    if position_bias is not None:
        need(
            position_bias.shape[0] == compress_ratio,
            f"position_bias has {position_bias.shape[0]} rows; it must have one for each of the {compress_ratio} "
            f"tokens of a group: pass this model's",
        )
    _check_state(kv, compress_ratio, stages, gate, state, state_slots)
    need(
        (block_table is None) == bool(block_size == -1),
        f"block_table is {'None' if block_table is None else 'given'} with block_size {block_size}; they come "
        f"together: pass both, or neither",
    )
    need(block_table is None or block_size > 0, f"block_size is {block_size}; it must be positive: pass a block's rows")
    if cos_sin is not None:
        _checks.rotary_table("kv", kv, cos_sin)
        need(
            cos_sin.shape[1] <= norm_weight.shape[0],
            f"cos_sin rotates {cos_sin.shape[1]} dims but rows have {norm_weight.shape[0]}; it must be at most that: "
            f"pass the table of this model",
        )


def _check_state(kv: Any, ratio: int, stages: int, gate: Any, state: Any, state_slots: Any) -> None:
    need(
        (state is None) == (state_slots is None),
        f"only {'state_slots' if state is None else 'state'} is given; state and state_slots come together: pass both",
    )
    if state is None:
        return
    need(gate is not None, "state is given with compress_ratio 1; a group of one token leaves nothing open: drop it")
    own = torch.float64 if kv.dtype == torch.float64 else torch.float32
    need(state.dtype == own, f"state is {state.dtype}; for kv in {kv.dtype} it must be {own}: allocate it so")
    need(
        state.shape[2] == 2 * kv.shape[1],
        f"state has rows of {state.shape[2]} numbers; it must have {2 * kv.shape[1]}, those of kv and of gate: "
        f"allocate it so",
    )
    need(
        state.shape[1] >= ratio * stages - 1,
        f"state has a ring of {state.shape[1]} rows; it must have at least {ratio * stages - 1}, for all tokens of an "
        f"entry but the last: allocate a longer one",
    )


@compress_kv.values
def _(kv, seq_lens, cu_seqlens_q, compress_ratio, state, state_slots, cos_sin, **_):
    _checks.queries(seq_lens, cu_seqlens_q, kv.shape[0])
    if cos_sin is not None:  # the row of each group's first token
        groups = -(-cos_sin.shape[0] // compress_ratio)
        _checks.within("seq_lens", seq_lens, 0, (groups + 1) * compress_ratio, "length", "cos_sin has no more rows")
    if state is not None:
        _checks.within("state_slots", state_slots, -1, state.shape[0], "state", "-1 is a sequence without one")
        held = [slot for slot in state_slots.tolist() if slot >= 0]
        need(
            len(set(held)) == len(held),
            f"state_slots {held} names a state twice; each sequence has its own: check its maker",
        )


@compress_kv.fake
def _(kv, norm_weight, seq_lens, compress_ratio, block_table, **_):
    num_tokens = kv.shape[0]
    num_rows = torch.sym_min(num_tokens, num_tokens // compress_ratio + seq_lens.shape[0])
    return (
        kv.new_empty(num_rows, norm_weight.shape[0]),
        kv.new_empty(num_rows, dtype=torch.int64),
        kv.new_empty(0 if block_table is None else num_rows, dtype=torch.int64),
    )


@compress_kv.samples
def _(device, dtype):
    make = Maker(device, dtype)
    single = Maker(device, torch.float32)

    def call(
        q_lens: list[int], seq_lens: list[int], ratio: int, overlap: bool = False, dim: int = 12, ring: int = 0,
        bias: bool = True, **other: Any,
    ) -> dict[str, Any]:  # fmt: skip
        stages = 2 if overlap else 1
        tokens, width, num_seqs = sum(q_lens), dim * stages, len(q_lens)
        arguments: dict[str, Any] = dict(
            kv=make.randn(tokens, width),
            norm_weight=1 + make.randn(dim, scale=0.1),
            seq_lens=make.ints(seq_lens),
            cu_seqlens_q=make.ints([sum(q_lens[:i]) for i in range(num_seqs + 1)]),
            compress_ratio=ratio,
            eps=1e-6,
            overlap=overlap,
        )
        if ratio > 1:
            # what no sequence wrote is NaN: whoever reads it shows
            ring = ring or ratio * stages
            state = torch.full((num_seqs + 2, ring, 2 * width), torch.nan, device=device)
            slots = make.permutation(num_seqs + 2)[:num_seqs].tolist()
            for slot, count, length in zip(slots, q_lens, seq_lens, strict=True):
                for position in range(max(length - count - ring, 0), length - count):
                    state[slot, position % ring] = single.randn(2 * width)
            arguments.update(gate=make.randn(tokens, width), state=state, state_slots=make.ints(slots))
            if bias:
                arguments.update(position_bias=single.randn(ratio, width))
        return {**arguments, **other}

    mixed = [1, 9, 0, 6, 3], [8, 9, 5, 21, 17]
    table = cos_sin_table(64, 4, 1e4, device=device)
    yield "ratio 4, overlap", call(*mixed, 4, True)
    yield "ratio 4, overlap, rotated", call(*mixed, 4, True, cos_sin=table)
    yield "ratio 7", call(*mixed, 7, cos_sin=table)
    yield "ratio 2, no bias", call(*mixed, 2, bias=False)
    yield "ratio 1", call(*mixed, 1, cos_sin=table)
    yield "prefill", call([13, 8], [13, 8], 4, True)
    yield "decode, no group closes", call([1, 1], [6, 3], 4, True)
    yield "decode, every group closes", call([1, 1, 1], [8, 4, 12], 4, True)
    yield "smallest ring", call(*mixed, 4, True, ring=7)
    yield "longer ring", call(*mixed, 2, ring=8, bias=False)
    blocks = make.ints([[5, 3, 0, -1], [1, 2, 9, 4], [7, -1, -1, -1], [8, 6, 10, -1], [11, 12, 13, 14]])
    yield "slots", call(*mixed, 4, True, block_table=blocks, block_size=2)
    yield "no state", call([9, 4], [9, 4], 4, True, state=None, state_slots=None)
    yield "a sequence without state", call(*mixed, 4, True, state_slots=make.ints([0, -1, 1, -1, 2]))
    padded = call(*mixed, 4, True)
    more = {name: torch.cat((padded[name], make.randn(2, 24))) for name in ("kv", "gate")}
    yield "rows past the batch", padded | more
    yield "graph padding", call([3, 1, 1], [7, 0, 0], 4, True, state_slots=make.ints([1, -1, -1]))
    yield "empty sequences", call([0, 0], [3, 0], 4, True)
    yield "empty batch", call([], [], 2)
    fused = make.randn(19, 60)
    yield "halves of one projection", padded | dict(kv=fused[:, :24], gate=fused[:, 30:54])
    yield "large gates", padded | dict(gate=padded["gate"] * 200)
    yield "large eps", call(*mixed, 4, True) | dict(eps=0.5)
    yield "zero rows", padded | dict(kv=padded["kv"] * 0, eps=1e-20, state_slots=make.ints([-1] * 5))
    yield "CSA", call([37, 1], [41, 128], 4, True, dim=512, cos_sin=cos_sin_table(200, 64, 1.6e5, device=device))
    yield "HCA", call([130, 1, 1], [150, 256, 255], 128, dim=512)
    yield "CSA2", call([37, 1], [41, 128], 2, dim=512, ring=8, bias=False)
