"""Lengths of a batch as host integers, for vendor ops that take them so: one wait for the device in each call, or none
where the caller gives them, as a captured graph wants it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError

_given: ContextVar[tuple[list[int], list[int]] | None] = ContextVar("lengths of the batch on the host", default=None)


@contextmanager
def given(cu_seqlens_q: Sequence[int], seq_lens: Sequence[int]) -> Iterator[None]:
    """The lengths of the calls within, [B + 1] and [B], so that none waits for the device and all can be captured.

    They must be what the calls' tensors hold. Every sequence has a query and a token, and no block of its tokens is -1:
    that is not looked at. Raises ArgumentError where a sequence has none.
    """
    ends, lens = list(cu_seqlens_q), list(seq_lens)
    rising = all(first < end for first, end in pairwise(ends))
    if len(ends) != len(lens) + 1 or ends[0] or not rising or min(lens, default=1) < 1:
        raise ArgumentError(
            f"cu_seqlens_q is {ends} and seq_lens {lens}; with B lengths go B + 1 rising numbers from 0, and every "
            f"sequence has a query and a token: leave empty sequences out of the batch"
        )
    token = _given.set((ends, lens))
    try:
        yield
    finally:
        _given.reset(token)


@dataclass(frozen=True)
class Batch:
    """The sequences of a varlen batch that have queries.

    q_ends       running sum of their numbers of queries, without the leading 0
    kv_lens      tokens of each in the cache
    block_table  [len(q_ends), max_blocks] int32
    """

    q_ends: list[int]
    kv_lens: list[int]
    block_table: Tensor

    @property
    def num_tokens(self) -> int:
        """Rows of q that belong to a sequence."""
        return self.q_ends[-1] if self.q_ends else 0


def read(op_name: str, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, block_size: int) -> Batch | None:
    """The batch, or None where it has what the vendor op leaves undefined: no block within a sequence, or no key."""
    import torch_npu

    if known := _given.get():
        ends, kv_lens = known
        if len(kv_lens) != seq_lens.shape[0]:
            raise ArgumentError(
                f"host_lengths.given has {len(kv_lens)} sequences and the call of {op_name} {seq_lens.shape[0]}; they "
                f"must be the same: give the lengths of this batch"
            )
        return Batch(ends[1:], kv_lens, block_table.int().contiguous())
    if torch_npu.npu.is_current_stream_capturing():
        raise UnsupportedError(
            f"{op_name} was called while a graph is captured; npu_fused_infer_attention_score_v2 takes lengths as host "
            f"integers, which a captured graph would keep for ever: give them with "
            f"kvbackend.backends.npu.host_lengths.given and update the graph, or choose the reference with "
            f"kvbackend.use('reference', ops={op_name!r})"
        )
    starts = torch.arange(block_table.shape[1], device=block_table.device) * block_size
    holes = ((starts[None] < seq_lens[:, None]) & (block_table < 0)).any()
    *ends, hole = torch.cat((cu_seqlens_q, seq_lens, holes[None].int())).tolist()  # waits for the device
    num_seqs = seq_lens.shape[0]
    ends, kv_lens = ends[: num_seqs + 1], ends[num_seqs + 1 :]
    with_queries = [i for i in range(num_seqs) if ends[i + 1] > ends[i]]
    if hole or any(kv_lens[i] == 0 for i in with_queries):
        return None
    if len(with_queries) < num_seqs:
        block_table = block_table.index_select(0, torch.tensor(with_queries, device=block_table.device))
    return Batch(
        [ends[i + 1] for i in with_queries], [kv_lens[i] for i in with_queries], block_table.int().contiguous()
    )


def has_holes(op_name: str, holes: Tensor) -> bool:
    """Whether a batch lacks a block where a query would look: `holes` [] bool of the device, unless lengths are given.

    For vendor ops that take lengths as tensors, and have no answer to a block of -1.
    """
    import torch_npu

    if _given.get():
        return False
    if torch_npu.npu.is_current_stream_capturing():
        raise UnsupportedError(
            f"{op_name} was called while a graph is captured; it waits for the device, to see whether a block is -1, "
            f"which a graph cannot: promise with kvbackend.backends.npu.host_lengths.given that none is, or choose the "
            f"reference with kvbackend.use('reference', ops={op_name!r})"
        )
    return bool(holes)  # waits for the device
