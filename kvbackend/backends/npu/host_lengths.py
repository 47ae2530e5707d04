"""Lengths of a batch as host integers, for vendor ops that take them so: one wait for the device in each call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedError


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

    if torch_npu.npu.is_current_stream_capturing():
        raise UnsupportedError(
            f"{op_name} was called while a graph is captured; npu_fused_infer_attention_score_v2 takes lengths as host "
            f"integers, which a captured graph would keep for ever: call {op_name} outside the graph, or choose its "
            f"reference with kvbackend.use('reference', ops={op_name!r})"
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
