"""A varlen batch as sequences of one query each, for kernels that take equally many queries of every sequence.

Nothing waits for the device. Two queries of one sequence read its keys twice, so this is for decoding: a few queries
of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..facts import fact
from ..ops import _math

MOST = 4  # queries of a sequence, on average, up to which a batch counts as decoding


@dataclass(frozen=True)
class SingleQueries:
    """Each query of a batch as a sequence.

    block_table  [T, max_blocks] int32: the blocks that hold tokens which the query sees, in order, then block 0
    lengths      [T] int32: the tokens that it sees; 1 where it sees none, since libraries leave 0 undefined
    empty        [T] bool: it sees none
    """

    block_table: Tensor
    lengths: Tensor
    empty: Tensor

    def results(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """out [T, H, Dv] and lse [T, H], or empty, with 0 and -inf where a query sees nothing."""
        return _math.blank(out, lse, self.empty)


def is_prefill(q_name: str, q: Any, seq_lens: Any) -> bool:
    """Whether a batch has too many queries for this."""
    return bool(fact(f"{q_name}.shape[0] > {MOST} * seq_lens.shape[0]", **{q_name: q, "seq_lens": seq_lens}))


def expand(
    block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, num_tokens: int, block_size: int,
    causal: bool,
) -> SingleQueries:  # fmt: skip
    """Every query of the batch as a sequence; blocks of -1 are dropped, since without a window only order counts."""
    sequence, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    last = own if causal else torch.where(own >= 0, seq_lens[sequence].long() - 1, -1)
    table = block_table[sequence]  # [T, max_blocks]
    starts = torch.arange(table.shape[1], device=table.device) * block_size
    held = (last[:, None] + 1 - starts).clamp(0, block_size).masked_fill(table < 0, 0)  # tokens that a block adds
    used_first = (held == 0).to(torch.int8).sort(dim=1, stable=True).indices
    table = torch.where(held > 0, table, 0).gather(1, used_first).int()
    lengths = held.sum(1)
    return SingleQueries(table, lengths.clamp(min=1).int(), lengths == 0)
