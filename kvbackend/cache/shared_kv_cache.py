"""Sequences over the caches of DeepSeek-V4 and V4.1: blocks of compressed rows, and a slot with rings for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import ArgumentError
from ..typed import checked, need_sizes
from .parts import usable
from .pool import MAX_BLOCKS, BlockPool
from .shared_kv import SharedKvLayer, SharedKvPages, Sizes


@dataclass
class _Sequence:
    """The blocks of a sequence, its slot, its tokens, and the most tokens that its rings have seen."""

    slot: int
    table: list[int] = field(default_factory=list)
    length: int = 0
    seen: int = 0


@dataclass(frozen=True)
class SharedKvBatch:
    """What the ops want to know of a batch, all on the cache's device.

    block_table [B, max_blocks], window_table [B, 1], state_slots [B], seq_lens [B], cu_seqlens_q [B+1]   int32
    max_seqlen_q   host integer
    positions      [T] int64, of the queries
    window_slots   [T] int64, where their rows go in the rings; -1 for those that later ones of the call overwrite
    """

    block_table: Tensor
    window_table: Tensor
    state_slots: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    positions: Tensor
    window_slots: Tensor

    @property
    def compress_arguments(self) -> dict[str, Any]:
        """Arguments of ops.compress_kv."""
        names = "block_table", "seq_lens", "cu_seqlens_q"
        return {name: getattr(self, name) for name in names}

    @property
    def attention_arguments(self) -> dict[str, Any]:
        """Arguments of ops.shared_kv_attention; layers with a window only take no block_table."""
        names = "window_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q"
        return {name: getattr(self, name) for name in names}

    @property
    def index_arguments(self) -> dict[str, Any]:
        """Arguments of ops.lightning_indexer and ops.candidate_blocks."""
        names = "block_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q"
        return {name: getattr(self, name) for name in names}


class SharedKvCache:
    """The windows, compressed rows, index keys and open groups of many sequences.

        layers = deepseek_v41_layers(config.compress_ratios, config.kv_source_layer_ids)
        cache = SharedKvCache(layers, num_blocks=1000, block_size=128, num_sequences=8, dtype=torch.bfloat16,
                              window_format="v41_fp8_528", kv_format="v41_fp4_288", index_format="index_mxfp4_68")
        seq = cache.new_sequence()
        cache.append(seq, 5)
        batch = cache.batch([seq], [5])                 # then the layers of `kvbackend.models`

    layers          SharedKvLayer for each layer, from deepseek_v4_layers or deepseek_v41_layers
    num_blocks      blocks of the pool; one holds compressed rows and index keys of block_size tokens, of every layer
    block_size      tokens of a block, a multiple of every compress_ratio
    num_sequences   sequences that may live at a time: each has a ring of window rows, and open groups, in every layer
    dtype           of rows that are not records, and of what is read; open groups are float32
    head_dim, window   of the model: width of a row, and tokens that a query sees in the window, itself included
    window_format, kv_format, index_format   how window rows, compressed rows and index keys are stored: "auto" or a
                    record. V4.1 was trained with v41_fp8_528, v41_fp4_288 and index_mxfp4_68
    rewind          last tokens that `truncate` can always take back: speculative tokens, 1 where there are none

    A fork shares the parent's full blocks; it has rings of its own, copied at once, and a copy of the last block when
    one of the two writes to it. Every call does all it says or raises (ArgumentError, OutOfBlocks) and changes nothing.
    Nothing is initialized: positions say what exists. Not thread-safe.
    Source: DeepSeek-V4, V4.1 (arXiv 2609.19969); blocks as in PagedAttention (arXiv 2309.06180).
    """

    @checked
    def __init__(
        self,
        layers: Sequence[SharedKvLayer],
        num_blocks: int,
        block_size: int,
        num_sequences: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        head_dim: int = 512,
        window: int = 128,
        window_format: str = "auto",
        kv_format: str = "auto",
        index_format: str = "auto",
        rewind: int = 1,
    ) -> None:
        need_sizes(self, 0, MAX_BLOCKS, num_blocks=num_blocks)
        need_sizes(self, block_size=block_size, num_sequences=num_sequences, head_dim=head_dim, window=window)
        need_sizes(self, 0, rewind=rewind)
        for index, layer in enumerate(layers):
            if layer.compress_ratio and block_size % layer.compress_ratio:
                raise ArgumentError(
                    f"block_size is {block_size}; layer {index} compresses {layer.compress_ratio} tokens to a row, "
                    f"which must divide it: choose a multiple of every compress_ratio"
                )
        self.sizes = Sizes(
            num_blocks, block_size, num_sequences, dtype, usable(device), head_dim, window, rewind,
            window_format, kv_format, index_format,
        )  # fmt: skip
        pages: list[SharedKvPages] = []
        for layer in layers:
            pages.append(SharedKvPages.allocate(layer, self.sizes, pages))
        self.layers = tuple(pages)
        self.pool = BlockPool(num_blocks)
        self.slots = BlockPool(num_sequences, what="slots of sequences (num_sequences)")
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    # bytes

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes of compressed rows and index keys by which one more token makes all layers grow."""
        return sum((pages.bytes_per_token for pages in self.layers), Fraction(0))

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of the open groups of one sequence."""
        return sum(pages.state_bytes_per_sequence for pages in self.layers)

    @property
    def window_bytes_per_sequence(self) -> int:
        """Bytes of the rings of one sequence."""
        return sum(pages.window_bytes_per_sequence for pages in self.layers)

    @property
    def pool_bytes(self) -> int:
        """Bytes allocated for blocks, padding included."""
        return sum(tensor.nbytes for pages in self.layers for tensor in pages.by_block)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.pool_bytes + sum(tensor.nbytes for pages in self.layers for tensor in pages.by_sequence)

    # sequences

    def new_sequence(self) -> int:
        """The id of a new, empty sequence. Raises OutOfBlocks where num_sequences live. Ids are never used again."""
        return self._add(_Sequence(self.slots.allocate(1)[0]))

    @checked
    def append(self, seq: int, num_tokens: int) -> None:
        """Make room for num_tokens more tokens. Without enough blocks: OutOfBlocks, with everything as it was."""
        self.append_batch([seq], [num_tokens])

    @checked
    def append_batch(self, seqs: Sequence[int], num_tokens: Sequence[int]) -> None:
        """`append` for many different sequences at once, for all of them or for none."""
        sequences = self._batch_of(seqs, num_tokens, "num_tokens")
        copied = self._to_copy(sequences, num_tokens)
        wanted = [
            self._blocks_for(sequence.length + count) - len(sequence.table)
            for sequence, count in zip(sequences, num_tokens, strict=True)
        ]
        blocks = iter(self.pool.allocate(len(copied) + sum(wanted)))
        pairs = [(sequence.table[-1], next(blocks)) for sequence in copied]
        self._copy([tensor for pages in self.layers for tensor in pages.by_block], pairs)
        for sequence, (shared, copy) in zip(copied, pairs, strict=True):
            sequence.table[-1] = copy
            self.pool.free([shared])
        for sequence, count, new in zip(sequences, num_tokens, wanted, strict=True):
            sequence.table += [next(blocks) for _ in range(new)]
            sequence.length += count
            sequence.seen = max(sequence.seen, sequence.length)

    @checked
    def grow(self, num_blocks: int) -> None:
        """Have so many blocks from now on; sequences and their blocks stay. `layers` are new objects."""
        if num_blocks < self.sizes.num_blocks:
            raise ArgumentError(
                f"num_blocks is {num_blocks}; the cache has {self.sizes.num_blocks} and can only grow: pass at least "
                f"that"
            )
        need_sizes(self, 0, MAX_BLOCKS, num_blocks=num_blocks)
        sizes = replace(self.sizes, num_blocks=num_blocks)
        pages: list[SharedKvPages] = []
        for before in self.layers:
            pages.append(before.grown(sizes, pages))
        self.sizes, self.layers = sizes, tuple(pages)
        self.pool.grow(num_blocks)

    @checked
    def fork(self, seq: int) -> int:
        """The id of a new sequence with the same tokens: it shares all blocks, and has a copy of the rings."""
        parent = self._sequence(seq)
        slot = self.slots.allocate(1)[0]
        self.pool.share(parent.table)
        self._copy([tensor for pages in self.layers for tensor in pages.by_sequence], [(parent.slot, slot)])
        return self._add(_Sequence(slot, list(parent.table), parent.length, parent.seen))

    @checked
    def truncate(self, seq: int, length: int) -> None:
        """Drop the tokens of a sequence from position `length` on, and free the blocks that held only those.

        The `rewind` last ones always; more where the rings still hold what the next token needs, else ArgumentError.
        """
        sequence = self._sequence(seq)
        if not 0 <= length <= sequence.length:
            raise ArgumentError(
                f"length is {length}; sequence {seq} has {sequence.length} tokens, and truncate keeps from 0 to all of "
                f"them: pass how many to keep"
            )
        lost = self._first_lost(sequence.seen, length)
        if lost is not None:
            raise ArgumentError(
                f"length is {length}; a token at that position needs the one at {lost}, which the rings of sequence "
                f"{seq} lost when they went on to {sequence.seen} tokens: keep more, fork before what may be taken "
                f"back, or make the cache with a larger rewind than {self.sizes.rewind}"
            )
        kept = self._blocks_for(length)
        self.pool.free(sequence.table[kept:])
        del sequence.table[kept:]
        sequence.length = length
        if length == 0:
            sequence.seen = 0

    @checked
    def free(self, seq: int) -> None:
        """Forget a sequence; free its slot, and the blocks that no other one shares."""
        sequence = self._sequence(seq)
        self.pool.free(sequence.table)
        self.slots.free([sequence.slot])
        del self._sequences[seq]

    @checked
    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._sequence(seq).length

    @checked
    def batch(self, seqs: Sequence[int], q_lens: Sequence[int]) -> SharedKvBatch:
        """What the ops want to know of a batch whose queries are the last q_lens tokens of each sequence."""
        sequences = self._batch_of(seqs, q_lens, "q_lens")
        ring, positions, slots = self.sizes.window_rows, list[int](), list[int]()
        for seq, sequence, count in zip(seqs, sequences, q_lens, strict=True):
            end = sequence.length
            if count > end:
                raise ArgumentError(
                    f"q_lens asks for {count} queries of sequence {seq}, which has {end} tokens; queries are its last "
                    f"tokens: append them first"
                )
            positions += range(end - count, end)
            slots += [sequence.slot * ring + p % ring if p >= end - ring else -1 for p in range(end - count, end)]
        width = max((len(sequence.table) for sequence in sequences), default=0)
        tables = [sequence.table + [-1] * (width - len(sequence.table)) for sequence in sequences]
        own = [sequence.slot for sequence in sequences]
        return SharedKvBatch(
            block_table=self._tensor(tables, torch.int32).reshape(len(sequences), width),
            window_table=self._tensor(own, torch.int32)[:, None],
            state_slots=self._tensor(own, torch.int32),
            seq_lens=self._tensor([sequence.length for sequence in sequences], torch.int32),
            cu_seqlens_q=self._tensor(list(accumulate(q_lens, initial=0)), torch.int32),
            max_seqlen_q=max(q_lens, default=0),
            positions=self._tensor(positions, torch.int64),
            window_slots=self._tensor(slots, torch.int64),
        )

    def _first_lost(self, seen: int, length: int) -> int | None:
        """The first position that a token at `length` needs and the rings have lost, having seen `seen` tokens."""
        rewind = self.sizes.rewind
        needs = {(max(length - self.sizes.window + 1, 0), self.sizes.window_rows)}
        for pages in self.layers:
            layer = pages.layer
            if layer.open_tokens:
                group = length // layer.compress_ratio * layer.compress_ratio
                needs.add((max(group - (layer.span - layer.compress_ratio), 0), layer.open_tokens + rewind))
        lost = [first for first, ring in needs if first < min(seen - ring, length)]
        return min(lost, default=None)

    def _to_copy(self, sequences: Sequence[_Sequence], counts: Sequence[int]) -> list[_Sequence]:
        """The sequences whose last block is shared and takes some of the new tokens, but for one that may keep it."""
        holders: dict[int, int] = {}
        copied = []
        for sequence, count in zip(sequences, counts, strict=True):
            if count == 0 or sequence.length % self.sizes.block_size == 0:
                continue
            last = sequence.table[-1]
            left = holders.setdefault(last, self.pool.ref_count(last))
            if left > 1:
                holders[last] = left - 1
                copied.append(sequence)
        return copied

    @staticmethod
    def _copy(tensors: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        for tensor in tensors if pairs else ():
            ops.copy_blocks(tensor, torch.tensor(pairs, dtype=torch.int64, device=tensor.device))

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.sizes.block_size)

    def _batch_of(self, seqs: Sequence[int], counts: Sequence[int], name: str) -> list[_Sequence]:
        if len(seqs) != len(counts):
            raise ArgumentError(
                f"{name} has {len(counts)} entries for {len(seqs)} sequences; it must have one for each: pass as many"
            )
        if len(set(seqs)) != len(seqs):  # rings and open groups are written to once a call
            raise ArgumentError(f"seqs is {list(seqs)}; a call takes a sequence once: add its tokens up")
        for count in counts:
            if count < 0:
                raise ArgumentError(f"{name} holds {count}; it must be 0 or more: pass a number of tokens")
        return [self._sequence(seq) for seq in seqs]

    def _sequence(self, seq: int) -> _Sequence:
        if seq not in self._sequences:
            raise ArgumentError(
                f"sequence {seq} is not in the cache; it has {len(self._sequences)}: pass an id of new_sequence or "
                f"fork that was not freed"
            )
        return self._sequences[seq]

    def _add(self, sequence: _Sequence) -> int:
        self._sequences[self._next_id] = sequence
        self._next_id += 1
        return self._next_id - 1

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.sizes.device)
