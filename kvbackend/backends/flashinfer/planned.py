"""A varlen batch as FlashInfer's wrappers plan it: from lengths on the host, so with one wait for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...ops import _math


@dataclass(frozen=True)
class Batch:
    """The sequences of a batch that have queries.

    num_tokens  rows of q that belong to a sequence
    qo_indptr   [n+1] int32 on the host: running sum of their numbers of queries
    kv_indptr   [n+1] int32 on the host: running sum of their numbers of pages
    kv_lens     [n] int32 on the host: their tokens, from the first block that is there; at least 1
    kv_indices  [pages] int32: their blocks
    empty       [num_tokens] bool: rows that see nothing, whatever the kernel gives them
    """

    num_tokens: int
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor
    kv_indices: Tensor
    empty: Tensor

    def results(self, out: Tensor, lse: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """out [used, H, Dv] and lse [used, H], or empty, as the op returns them for num_tokens rows."""
        out, lse = _math.blank(out, lse, self.empty)
        past = out.new_empty(num_tokens - self.num_tokens, *out.shape[1:])  # rows of no sequence
        nothing, no_lse = _math.nothing_seen(past, out.shape[2], lse.numel() > 0)
        return torch.cat((out, nothing)), torch.cat((lse, no_lse))


def read(
    op_name: str, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, num_tokens: int,
    block_size: int, causal: bool, window: int = -1,
) -> Batch | None:  # fmt: skip
    """The batch, or None where it has what FlashInfer has not: a block of -1 behind one that is there, or no query."""
    if block_table.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{op_name} was called while a graph is captured; FlashInfer's wrappers plan on the host, and a captured "
            f"graph would keep that plan for ever: call {op_name} outside the graph, or choose another backend with "
            f"kvbackend.use('cuda_triton', ops={op_name!r})"
        )
    num_seqs, width = block_table.shape
    starts = torch.arange(width, device=block_table.device) * block_size
    holes = (starts < seq_lens[:, None]) & (block_table < 0)
    first_blocks = holes.int().cumprod(1).sum(1)  # [B]: blocks that were freed, from the first on
    scattered = (holes.sum(1) != first_blocks).any()
    host = torch.cat((cu_seqlens_q, seq_lens, first_blocks.int(), scattered[None].int())).cpu()  # waits for the device
    ends, lengths, freed = host[:-1].split((num_seqs + 1, num_seqs, num_seqs))
    with_queries = ends.diff() > 0
    if bool(host[-1]) or not bool(with_queries.any()):
        return None
    lengths, freed, rows = lengths[with_queries], freed[with_queries], torch.arange(num_seqs)[with_queries]
    kept = (lengths - freed * block_size).int()
    pages = -(-kept.clamp(min=1) // block_size)
    # a sequence that holds nothing is given block 0, which stands behind the table
    flat = torch.cat((block_table.flatten(), block_table.new_zeros(1)))
    first = torch.where(kept > 0, rows * width + freed, flat.shape[0] - 1)
    kv_indptr = _running(pages)
    place = torch.arange(int(kv_indptr[-1])) - kv_indptr[:-1].repeat_interleave(pages) + first.repeat_interleave(pages)
    used = int(ends[-1])
    return Batch(
        used, _running(ends.diff()[with_queries]), kv_indptr, kept.clamp(min=1),
        flat[place.to(flat.device)].int(),
        _empty(seq_lens, cu_seqlens_q, max_seqlen_q, used, first_blocks * block_size, causal, window),
    )  # fmt: skip


def _running(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()


def _empty(
    seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, num_tokens: int, freed: Tensor, causal: bool, window: int
) -> Tensor:
    """[num_tokens] bool: queries before the first token that is there, or with a window that ends before it."""
    sequence, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    last = own if causal else seq_lens[sequence].long() - 1
    first = freed[sequence] if window < 0 else torch.maximum(freed[sequence], own - window + 1)
    return (own < 0) | (last < first)
