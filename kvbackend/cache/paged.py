"""Sequences over paged memory: each has one block table, which all layers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from operator import index
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import ArgumentError
from .layers import Layer, Pages
from .pool import BlockPool

MAX_BLOCKS = 2**31 - 1  # block tables are int32


@dataclass
class _Sequence:
    """The blocks of a sequence in order, just enough for its tokens; the last may be filled in part."""

    table: list[int] = field(default_factory=list)
    length: int = 0


class PagedCache:
    """The keys and values of many sequences, in blocks of one pool.

        layers = [GqaLayer(kv_heads=8, head_dim=128)] * 32
        cache = PagedCache(layers, num_blocks=1000, block_size=16, dtype=torch.bfloat16)
        seq = cache.new_sequence()
        slots = cache.append(seq, 5)                            # room for the keys and values of 5 tokens
        batch = cache.batch([seq], [5])
        for pages in cache.layers:
            pages.write(slots, key, value)                      # [5, 8, 128] each
            out, _ = kvbackend.ops.paged_attention(q, *pages.caches, **batch, softmax_scale=128**-0.5)

    layers       what each layer keeps of a token: GqaLayer and MlaLayer, in any mixture
    num_blocks   blocks of the pool; a block holds block_size tokens of every layer
    block_size   tokens of a block, from 1
    dtype        torch.float32, torch.bfloat16 or torch.float16
    layout       how pages sit in memory: "NHD", "HND" or "interleaved", as in `kvbackend.layouts`; for MLA see MlaLayer

    A fork shares its parent's blocks. A block is written by its one holder only: an append to a sequence whose last
    block is shared and not full gives the sequence a copy of that block first, in every layer.
    Every call does all it says or raises (ArgumentError, OutOfBlocks) and changes nothing. Pages are not initialized,
    and freeing leaves contents in place: what no sequence names is never read. Not thread-safe.
    Source: PagedAttention (arXiv 2309.06180), sections 4.3 and 4.4.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
    ) -> None:
        self.specs = tuple(layers)
        self.bytes_per_token = _bytes_per_token(self.specs, block_size, dtype)
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise ArgumentError(
                f"num_blocks is {num_blocks}; it must be from 1 to {MAX_BLOCKS}: pass how many blocks of "
                f"{block_size * self.bytes_per_token} bytes the cache may have, or use with_memory"
            )
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        self.layers: tuple[Pages, ...] = tuple(
            spec.allocate(num_blocks, block_size, dtype, self.device, layout) for spec in self.specs
        )
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    @classmethod
    def with_memory(
        cls,
        memory_bytes: int,
        layers: Sequence[Layer],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
    ) -> PagedCache:
        """A cache of as many blocks as fit in memory_bytes, all layers together."""
        block_bytes = block_size * _bytes_per_token(tuple(layers), block_size, dtype)
        if memory_bytes < block_bytes:
            raise ArgumentError(
                f"memory_bytes is {memory_bytes}; one block of {block_size} tokens takes {block_bytes} bytes in "
                f"{len(layers)} layers: give at least that, or choose a smaller block_size"
            )
        return cls(layers, memory_bytes // block_bytes, block_size, dtype, device, layout)

    # sequences

    def new_sequence(self) -> int:
        """The id of a new, empty sequence. Ids are never used again."""
        return self._add(_Sequence())

    def append(self, seq: int, num_tokens: int) -> Tensor:
        """Make room for num_tokens more tokens; their slots [num_tokens] int64, to be written in every layer.

        Raises OutOfBlocks, with everything as it was, where the pool has too few free blocks.
        """
        return self.append_batch([seq], [num_tokens])

    def append_batch(self, seqs: Sequence[int], num_tokens: Sequence[int]) -> Tensor:
        """`append` for many different sequences at once, for all of them or for none.

        Returns slots [sum(num_tokens)] int64: those of the first sequence, in order of its tokens, then the second's.
        """
        sequences, counts = self._batch_of(seqs, num_tokens, "num_tokens")
        for seq, mentions in Counter(seqs).items():
            if mentions > 1:
                raise ArgumentError(
                    f"seqs names sequence {seq} {mentions} times; a call appends to a sequence once: add its tokens up"
                )
        sources = self._to_copy(sequences, counts)
        num_new = sum(
            self._blocks_for(sequence.length + count) - len(sequence.table)
            for sequence, count in zip(sequences, counts, strict=True)
        )
        blocks = self.pool.allocate(len(sources) + num_new)
        try:
            copies, new = dict(zip(sources, blocks, strict=False)), iter(blocks[len(sources) :])
            self._copy([(sources[i], copy) for i, copy in copies.items()])
            tails, slots = [], list[int]()
            for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
                # the blocks from the one that the first new token goes to
                full, offset = divmod(sequence.length, self.block_size)
                tail = [copies[i]] if i in copies else sequence.table[full:]
                tail += islice(new, self._blocks_for(sequence.length + count) - full - len(tail))
                tails.append(tail)
                slots += self._slots(tail, offset, count)
            slot_mapping = self._tensor(slots, torch.int64)
        except BaseException:
            self.pool.free(blocks)
            raise
        for sequence, count, tail in zip(sequences, counts, tails, strict=True):
            sequence.table[sequence.length // self.block_size :] = tail
            sequence.length += count
        self.pool.free(list(sources.values()))
        return slot_mapping

    def fork(self, seq: int) -> int:
        """The id of a new sequence with the same tokens. It shares all blocks, so it costs none."""
        sequence = self._sequence(seq)
        self.pool.share(sequence.table)
        return self._add(_Sequence(list(sequence.table), sequence.length))

    def truncate(self, seq: int, length: int) -> None:
        """Drop the tokens of a sequence from position `length` on, and free the blocks that held only those."""
        sequence, length = self._sequence(seq), index(length)
        if not 0 <= length <= sequence.length:
            raise ArgumentError(
                f"length is {length}; sequence {seq} has {sequence.length} tokens, and truncate keeps from 0 to all of "
                f"them: pass how many to keep"
            )
        kept = self._blocks_for(length)
        self.pool.free(sequence.table[kept:])
        del sequence.table[kept:]
        sequence.length = length

    def free(self, seq: int) -> None:
        """Forget a sequence, and free the blocks that no other one shares."""
        self.pool.free(self._sequence(seq).table)
        del self._sequences[seq]

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._sequence(seq).length

    def batch(self, seqs: Sequence[int], q_lens: Sequence[int]) -> dict[str, Any]:
        """What an attention op wants to know of a batch, by the names of its arguments.

        q_lens   queries of each sequence: its last tokens, already appended
        Returns block_table [B, max_blocks] (-1 past the end of a sequence), seq_lens [B], cu_seqlens_q [B+1], all int32
        on the cache's device, and max_seqlen_q.
        """
        sequences, counts = self._batch_of(seqs, q_lens, "q_lens")
        for seq, sequence, count in zip(seqs, sequences, counts, strict=True):
            if count > sequence.length:
                raise ArgumentError(
                    f"q_lens asks for {count} queries of sequence {seq}, which has {sequence.length} tokens; queries "
                    f"are its last tokens: append them first"
                )
        width = max((len(sequence.table) for sequence in sequences), default=0)
        tables = [sequence.table + [-1] * (width - len(sequence.table)) for sequence in sequences]
        return {
            "block_table": self._tensor(tables, torch.int32).reshape(len(sequences), width),
            "seq_lens": self._tensor([sequence.length for sequence in sequences], torch.int32),
            "cu_seqlens_q": self._tensor(list(accumulate(counts, initial=0)), torch.int32),
            "max_seqlen_q": max(counts, default=0),
        }

    def read(self, layer: int, seq: int) -> tuple[Tensor, Tensor]:
        """A copy of a sequence's rows in one layer: keys and values [length, kv_heads, dim], or MLA's two parts."""
        length = self.length(seq)
        batch = self.batch([seq], [length])
        first, second = (
            ops.gather_cache(cache, batch["block_table"], batch["cu_seqlens_q"], length)
            for cache in self.layers[layer].caches
        )
        return first, second

    # figures

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the sequences there are, oldest first."""
        return tuple(self._sequences)

    @property
    def blocks_total(self) -> int:
        """Blocks of the cache; blocks_free + blocks_used."""
        return self.pool.num_blocks

    @property
    def blocks_free(self) -> int:
        """Blocks that no sequence holds."""
        return self.pool.num_free

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences hold; a shared one counts once."""
        return self.pool.num_used

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block_size * self.bytes_per_token

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that the pages of all layers take, used or not."""
        storages = [cache.untyped_storage() for pages in self.layers for cache in pages.caches]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # layouts may share one

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that sequences name; a row that several share counts once. Walks all block tables."""
        filled: dict[int, int] = {}
        for sequence in self._sequences.values():
            for i, block in enumerate(sequence.table):
                rows = min(self.block_size, sequence.length - i * self.block_size)
                filled[block] = max(rows, filled.get(block, 0))
        return sum(filled.values()) * self.bytes_per_token

    def __repr__(self) -> str:
        return (
            f"<PagedCache: {len(self.layers)} layers, {len(self._sequences)} sequences, {self.blocks_used} of "
            f"{self.blocks_total} blocks of {self.block_size} tokens in use, {self.bytes_per_token} bytes per token>"
        )

    # parts

    def _add(self, sequence: _Sequence) -> int:
        seq, self._next_id = self._next_id, self._next_id + 1
        self._sequences[seq] = sequence
        return seq

    def _sequence(self, seq: int) -> _Sequence:
        if seq not in self._sequences:
            known = isinstance(seq, int) and 0 <= seq < self._next_id
            raise ArgumentError(
                f"seq is {seq!r}, {'which was freed' if known else 'which this cache never made'}; there are "
                f"{len(self._sequences)} sequences: pass an id from new_sequence or fork"
            )
        return self._sequences[seq]

    def _batch_of(self, seqs: Sequence[int], counts: Sequence[int], name: str) -> tuple[list[_Sequence], list[int]]:
        counts = [index(count) for count in counts]
        if len(seqs) != len(counts):
            raise ArgumentError(
                f"{name} has {len(counts)} entries for {len(seqs)} sequences; it must have one for each: pass as many"
            )
        for seq, count in zip(seqs, counts, strict=True):
            if count < 0:
                raise ArgumentError(
                    f"{name} is {count} for sequence {seq}; it must be 0 or more: pass a count of tokens"
                )
        return [self._sequence(seq) for seq in seqs], counts

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _to_copy(self, sequences: list[_Sequence], counts: list[int]) -> dict[int, int]:
        """Shared blocks that an append would write, by the index of their sequence.

        Of those who write one block, each takes a copy while somebody else is left to hold the block.
        """
        sources: dict[int, int] = {}
        copied = Counter[int]()
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            if count and sequence.length % self.block_size:
                last = sequence.table[-1]
                if self.pool.ref_count(last) - copied[last] > 1:
                    sources[i] = last
                    copied[last] += 1
        return sources

    def _slots(self, blocks: list[int], offset: int, count: int) -> Iterator[int]:
        """Slots of `count` tokens that fill blocks one after the other, from `offset` in the first."""
        for block in blocks:
            rows = min(self.block_size - offset, count)
            start = block * self.block_size + offset
            yield from range(start, start + rows)
            offset, count = 0, count - rows

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in every layer."""
        if pairs:
            mapping = self._tensor(pairs, torch.int64)  # [n, 2]
            for pages in self.layers:
                for cache in pages.caches:
                    ops.copy_blocks(cache, mapping)

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _bytes_per_token(layers: tuple[Layer, ...], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one token in all layers; raises ArgumentError for sizes that no cache can have."""
    if not layers:
        raise ArgumentError("layers is empty; a cache has at least one: pass a GqaLayer or MlaLayer for each layer")
    if block_size < 1:
        raise ArgumentError(f"block_size is {block_size}; it must be 1 or more: pass the tokens of one block")
    return sum(layer.bytes_per_token(dtype) for layer in layers)
