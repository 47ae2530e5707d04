"""Sequences over paged memory: each has one block table, which all layers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from operator import index
from typing import Any

import torch
from torch import Tensor

from .. import formats, ops
from ..errors import ArgumentError
from ..typed import checked, need_sizes
from . import kivi
from .dsa import DsaPages
from .kept import Append, Kept
from .layers import FullRows, GqaPages, Layer, MlaPages, Pages, PageSizes, Scales, static_scales
from .parts import is_quantized, usable
from .pool import MAX_BLOCKS, BlockPool

KVFormats = str | Sequence[str] | Callable[[int], str]


@dataclass
class _Sequence:
    """The blocks of a sequence in order, just enough for its tokens; the last may be filled in part.

    full   the block in full precision of some of them, by their index in the table
    """

    table: list[int] = field(default_factory=list)
    length: int = 0
    full: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Tables:
    """Block tables of a batch, apart: rows that are codes only, and rows in full precision; None: there are none."""

    batch: dict[str, Any]
    codes: Tensor | None
    full: Tensor | None


class PagedCache:
    """The keys and values of many sequences, in blocks of one pool.

        layers = [GqaLayer(kv_heads=8, head_dim=128)] * 32
        cache = PagedCache(layers, num_blocks=1000, block_size=16, dtype=torch.bfloat16)
        seq = cache.new_sequence()
        slots = cache.append(seq, 5)                            # room for the keys and values of 5 tokens
        batch = cache.batch([seq], [5])
        for pages in cache.layers:
            pages.write(slots, key, value)                      # [5, 8, 128] each
            out, _ = kvbackend.ops.paged_attention(q, **pages.arguments, **batch, softmax_scale=128**-0.5)

    layers       what each layer keeps of a token: GqaLayer and MlaLayer, in any mixture
    num_blocks   blocks of the pool; a block holds block_size tokens of every layer
    block_size   tokens of a block, from 1
    dtype        of the rows that are written and read: torch.float32, torch.bfloat16 or torch.float16
    layout       how pages sit in memory: "NHD", "HND" or "interleaved", as in `kvbackend.layouts`; for MLA see MlaLayer
    kv_format    how tokens are stored: a name of `kvbackend.formats` for all layers ("int8/fp8_e4m3" names one for keys
                 and one for values), a list with a name for each layer, or a function from a layer's index to its name.
                 Shallow fp4 and deep fp8: ["fp4_e2m1"] * 8 + ["fp8_e4m3:token_head"] * 24. "auto" stores rows as they
                 are. "int4" (KIVI), whose key scales span tokens, keeps the newest block in full precision and codes a
                 block when it leaves the recent window; all rows of an append are then written in one call
    scales       {"k_scale": ..., "v_scale": ...} for each layer, or None: the static scales of formats that have them,
                 float32, per tensor [1], head [kv_heads] or channel [kv_heads, dim], and nvfp4's global one [1]. What
                 is left out is 1 for nvfp4, and for FP8, as in vLLM, so that numbers saturate at 448 (e4m3) or 57344
                 (e5m2); 4-bit codes with a static scale must be given one
    keep_recent, keep_sinks   the last and the first tokens of a sequence that are kept in full precision besides: at
                 least so many, since whole blocks are. `attend` and `read` use them; an op called with
                 `pages.arguments` sees codes only
    keep_blocks  blocks in full precision, for all sequences together; None: enough for 8

    A fork shares its parent's blocks. A block is written by its one holder only: an append to a sequence whose last
    block is shared and not full gives the sequence a copy of that block first, in every layer, with its scales.
    Rows are quantized when they are written. Leaving the last keep_recent tokens costs nothing and changes no code;
    after `truncate` into tokens that have left, those stay codes, and so do new ones in their block.
    Every call does all it says or raises (ArgumentError, OutOfBlocks) and changes nothing. Pages are not initialized,
    and freeing leaves contents in place: what no sequence names is never read. Not thread-safe.
    Source: PagedAttention (arXiv 2309.06180), sections 4.3 and 4.4.
    """

    @checked
    def __init__(
        self,
        layers: Sequence[Layer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
        kv_format: KVFormats = "auto",
        scales: Sequence[Scales | None] | None = None,
        keep_recent: int = 0,
        keep_sinks: int = 0,
        keep_blocks: int | None = None,
    ) -> None:
        num_blocks, block_size = index(num_blocks), index(block_size)
        need_sizes(self, block_size=block_size)
        self.specs = tuple(layers)
        self.kv_formats = formats_of_layers(kv_format, len(self.specs))
        self.bytes_per_token = _bytes_per_token(self.specs, block_size, dtype, self.kv_formats)
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise ArgumentError(
                f"num_blocks is {num_blocks}; it must be from 1 to {MAX_BLOCKS}: pass how many blocks of "
                f"{block_size * self.bytes_per_token} bytes the cache may have, or use with_memory"
            )
        self.block_size = block_size
        self.dtype = dtype
        self.device = usable(device)
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        self.kept: Kept | None = None
        self._key_groups = any(kivi.is_kivi(formats.pair(name)[0]) for name in self.kv_formats)
        if self._key_groups:
            keep_recent = max(keep_recent, 1)  # the block whose groups are open
        if keep_recent or keep_sinks:
            self.kept = Kept(keep_recent, keep_sinks, block_size, num_blocks, keep_blocks, self._key_groups)
        elif keep_blocks is not None:
            raise ArgumentError(
                f"keep_blocks is {keep_blocks}, but keep_recent and keep_sinks are 0; blocks in full precision are "
                f"theirs: pass one of them, or leave keep_blocks out"
            )
        given = _scales_of(scales, self.specs, dtype, self.kv_formats)
        for spec, name in zip(self.specs, self.kv_formats, strict=True):
            spec.check_layout(layout, dtype, name)
        # [num_blocks]: which block in full precision holds the rows of a block too; writes ask it on the device
        self._full_blocks = self._no_blocks(num_blocks if self.kept is not None else 0)
        keep_blocks = self.kept.pool.num_blocks if self.kept is not None else 0
        self.layers: tuple[Pages, ...] = self._allocate(num_blocks, keep_blocks, self._full_blocks, given)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._tables: tuple[tuple[Any, ...], _Tables] | None = None  # of the last batch that attended

    @classmethod
    @checked
    def with_memory(
        cls,
        memory_bytes: int,
        layers: Sequence[Layer],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
        kv_format: KVFormats = "auto",
        scales: Sequence[Scales | None] | None = None,
    ) -> PagedCache:
        """A cache of as many blocks as fit in memory_bytes, all layers together, their static scales included."""
        specs = tuple(layers)
        names = formats_of_layers(kv_format, len(specs))
        block_bytes = block_size * _bytes_per_token(specs, block_size, dtype, names)
        fixed_bytes = _fixed_scale_bytes(specs, dtype, names)
        if memory_bytes < block_bytes + fixed_bytes:
            static = f" and static scales {fixed_bytes}" if fixed_bytes else ""
            raise ArgumentError(
                f"memory_bytes is {memory_bytes}; one block of {block_size} tokens takes {block_bytes} bytes in "
                f"{len(specs)} layers{static}: give at least that, or choose a smaller block_size"
            )
        num_blocks = (memory_bytes - fixed_bytes) // block_bytes
        return cls(specs, num_blocks, block_size, dtype, device, layout, names, scales)

    @checked
    def grow(self, num_blocks: int, keep_blocks: int | None = None) -> None:
        """Have so many blocks, and so many in full precision, from now on; sequences and their blocks stay.

        Both pages exist while it copies. `layers` are new objects: tensors taken from the old ones are stale.
        """
        full = None if self.kept is None else self.kept.pool
        keep_blocks = (full.num_blocks if full else 0) if keep_blocks is None else keep_blocks
        for name, count, held in (("num_blocks", num_blocks, self.pool), ("keep_blocks", keep_blocks, full)):
            if count < (held.num_blocks if held else 0) or (count and held is None):
                raise ArgumentError(
                    f"{name} is {count}; the cache has {held.num_blocks if held else 0} and can only grow"
                    f"{'' if held else ' where keep_recent or keep_sinks was given'}: pass at least that"
                )
            need_sizes(self, 0, MAX_BLOCKS, **{name: count})
        full_blocks = self._no_blocks(num_blocks if full else 0)
        full_blocks[: len(self._full_blocks)] = self._full_blocks
        scales = [pages.static_scales for pages in self.layers]
        layers = self._allocate(num_blocks, keep_blocks, full_blocks, scales)
        for before, after in zip(self.layers, layers, strict=True):
            old_new = [*zip(before.tensors, after.tensors, strict=True)]
            if before.full is not None and after.full is not None:
                old_new += zip(before.full.pages.tensors, after.full.pages.tensors, strict=True)
            for old, new in old_new:
                new[: len(old)] = old
        self.pool.grow(num_blocks)
        if full:
            full.grow(keep_blocks)
        self.layers, self._full_blocks = layers, full_blocks

    def _no_blocks(self, count: int) -> Tensor:
        return torch.full((count,), -1, dtype=torch.int64, device=self.device)

    def _allocate(
        self, num_blocks: int, keep_blocks: int, full_blocks: Tensor, scales: Sequence[Scales | None]
    ) -> tuple[Pages, ...]:
        """Pages of every layer, with blocks in full precision where some are kept and the layer has codes."""
        sizes = PageSizes(num_blocks, self.block_size, self.dtype, self.device, self.layout)
        layers: list[Pages] = []
        for spec, name, given in zip(self.specs, self.kv_formats, scales, strict=True):
            pages = spec.allocate(sizes, name, given)
            if keep_blocks and is_quantized(name):
                kept = spec.allocate(replace(sizes, num_blocks=keep_blocks))
                pages = replace(pages, full=FullRows(kept, full_blocks))
            layers.append(pages)
        return tuple(layers)

    # sequences

    def new_sequence(self) -> int:
        """The id of a new, empty sequence. Ids are never used again."""
        return self._add(_Sequence())

    @checked
    def append(self, seq: int, num_tokens: int) -> Tensor:
        """Make room for num_tokens more tokens; their slots [num_tokens] int64, to be written in every layer.

        Raises OutOfBlocks, with everything as it was, where the pool has too few free blocks.
        """
        return self.append_batch([seq], [num_tokens])

    @checked
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
        full_blocks: list[int] = []
        try:
            copies, new = dict(zip(sources, blocks, strict=False)), iter(blocks[len(sources) :])
            kept = self._to_keep(sequences, counts, copies)
            if self.kept is not None:
                full_blocks = self.kept.pool.allocate(sum(change.wanted for change in kept))
            fulls = self._full_after(sequences, kept, full_blocks)
            self._copy([(sources[i], copy) for i, copy in copies.items()])
            self._copy_full(
                [
                    (sequence.full[change.copied], full[change.copied])
                    for sequence, change, full in zip(sequences, kept, fulls, strict=False)
                    if change.copied is not None
                ]
            )
            tails, slots = [], list[int]()
            for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
                # the blocks from the one that the first new token goes to
                full, offset = divmod(sequence.length, self.block_size)
                tail = [copies[i]] if i in copies else sequence.table[full:]
                tail += islice(new, self._blocks_for(sequence.length + count) - full - len(tail))
                tails.append(tail)
                slots += self._slots(tail, offset, count)
            slot_mapping = self._tensor(slots, torch.int64)
            self._tell_pages(sequences, kept, tails, fulls)
        except BaseException:
            self.pool.free(blocks)
            if self.kept is not None:
                self.kept.pool.free(full_blocks)
            raise
        if self.kept is not None:
            self._code_dropped(sequences, kept)
            for sequence, change, held in zip(sequences, kept, fulls, strict=True):
                gone = change.dropped if change.copied is None else [*change.dropped, change.copied]
                self.kept.pool.free([sequence.full[i] for i in gone])
                sequence.full = held
        for sequence, count, tail in zip(sequences, counts, tails, strict=True):
            sequence.table[sequence.length // self.block_size :] = tail
            sequence.length += count
        self.pool.free(list(sources.values()))
        self._tables = None
        return slot_mapping

    @checked
    def fork(self, seq: int) -> int:
        """The id of a new sequence with the same tokens. It shares all blocks, so it costs none."""
        sequence = self._sequence(seq)
        self.pool.share(sequence.table)
        if self.kept is not None:
            self.kept.pool.share(sequence.full.values())
        return self._add(_Sequence(list(sequence.table), sequence.length, dict(sequence.full)))

    @checked
    def truncate(self, seq: int, length: int) -> None:
        """Drop the tokens of a sequence from position `length` on, and free the blocks that held only those.

        In int4, a block that is now filled in part goes back to full precision, as its codes read, so that its groups
        can be filled anew; raises OutOfBlocks, with everything as it was, where there is no room for it.
        """
        sequence, length = self._sequence(seq), index(length)
        if not 0 <= length <= sequence.length:
            raise ArgumentError(
                f"length is {length}; sequence {seq} has {sequence.length} tokens, and truncate keeps from 0 to all of "
                f"them: pass how many to keep"
            )
        kept = self._blocks_for(length)
        gone = [i for i in sorted(sequence.full) if i >= kept]
        if self._opens(sequence, length):
            assert self.kept is not None
            if not any(self.kept.pool.ref_count(sequence.full[i]) == 1 for i in gone):
                self.kept.pool.free(self.kept.pool.allocate(1))  # raises where there is none
        self.pool.free(sequence.table[kept:])
        del sequence.table[kept:]
        if self.kept is not None:
            self.kept.pool.free([sequence.full.pop(i) for i in gone])
        if self._opens(sequence, length):
            self._open_last(sequence)
        sequence.length = length
        self._tables = None

    @checked
    def free(self, seq: int) -> None:
        """Forget a sequence, and free the blocks that no other one shares."""
        sequence = self._sequence(seq)
        self.pool.free(sequence.table)
        if self.kept is not None:
            self.kept.pool.free(sequence.full.values())
        del self._sequences[seq]
        self._tables = None

    @checked
    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._sequence(seq).length

    @checked
    def batch(self, seqs: Sequence[int], q_lens: Sequence[int]) -> dict[str, Any]:
        """What an attention op wants to know of a batch, by the names of its arguments.

        q_lens   queries of each sequence: its last tokens, already appended
        Returns block_table [B, max_blocks] (-1 past the end of a sequence), seq_lens [B], cu_seqlens_q [B+1], all int32
        on the cache's device, and max_seqlen_q.
        """
        sequences, counts = self.last_tokens(seqs, q_lens, "q_lens")
        width = max((len(sequence.table) for sequence in sequences), default=0)
        tables = [sequence.table + [-1] * (width - len(sequence.table)) for sequence in sequences]
        return {
            "block_table": self._tensor(tables, torch.int32).reshape(len(sequences), width),
            "seq_lens": self._tensor([sequence.length for sequence in sequences], torch.int32),
            "cu_seqlens_q": self._tensor(list(accumulate(counts, initial=0)), torch.int32),
            "max_seqlen_q": max(counts, default=0),
        }

    def last_tokens(self, seqs: Sequence[int], counts: Sequence[int], name: str) -> tuple[list[_Sequence], list[int]]:
        """The sequences and counts, of types that the caller has checked; raises ArgumentError unless there is a count
        for each sequence, which has so many tokens."""
        sequences, counts = self._batch_of(seqs, counts, name)
        for seq, sequence, count in zip(seqs, sequences, counts, strict=True):
            if count > sequence.length:
                raise ArgumentError(
                    f"{name} asks for {count} tokens of sequence {seq}, which has {sequence.length}; they are its last "
                    f"ones: append them first"
                )
        return sequences, counts

    @checked
    def pages(self, layer: int) -> Pages:
        """The pages of a layer; raises ArgumentError for an index that none has."""
        if not 0 <= layer < len(self.layers):
            raise ArgumentError(
                f"layer is {layer}; the cache has {len(self.layers)}: pass an index from 0 to below that"
            )
        return self.layers[layer]

    @checked
    def attend(
        self,
        layer: int,
        q: Tensor | tuple[Tensor, Tensor],
        seqs: Sequence[int],
        q_lens: Sequence[int],
        softmax_scale: float,
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attention from the last q_lens tokens of sequences, over codes and over what is kept in full precision.

        q         [T, H, D], T being sum(q_lens); for an MlaLayer the pair (q_nope, q_pe)
        options   for paged_attention: causal, window, softcap, sinks; for mla_attention: causal
        Returns out and lse as these ops do. A token is read from one place only, in full precision if it is kept so, by
        all queries of the call; the parts are joined by merge_attn_states, so the result is that of one call over the
        rows that `read` gives.
        """
        pages = self.pages(layer)
        tables = self._tables_of(seqs, q_lens)
        latent = isinstance(pages, MlaPages)
        op = ops.mla_attention if latent else ops.paged_attention
        queries = dict(zip(("q_nope", "q_pe"), q, strict=True)) if latent else {"q": q}
        shared = {**tables.batch, **queries, "softmax_scale": softmax_scale}
        if pages.full is None or tables.full is None:
            out, lse = op(**shared, **pages.arguments, return_lse=return_lse, **options)
            return out, lse
        shared["block_table"] = tables.full
        if tables.codes is None:
            out, lse = op(**shared, **pages.full.pages.arguments, return_lse=return_lse, **options)
            return out, lse
        sinks = options.pop("sinks", None)  # they enter the denominator once
        parts = [
            op(**{**shared, "block_table": table}, **source.arguments, return_lse=True, **options)
            for table, source in ((tables.codes, pages), (tables.full, pages.full.pages))
        ]
        outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
        out, lse = ops.merge_attn_states(outs, lses, None if sinks is None else sinks.float())
        return out, lse if return_lse else lse.new_empty(0)

    @checked
    def read(self, layer: int, seq: int) -> tuple[Tensor, Tensor]:
        """A copy of a sequence's rows in one layer: keys and values [length, kv_heads, dim], or MLA's two parts.

        In the cache's dtype: codes dequantized in float32 and rounded once, kept rows as they were written.
        """
        sequence, pages = self._sequence(seq), self.pages(layer)
        rows = self._gather(pages, self.batch([seq], [sequence.length]), sequence.length)
        if pages.full is None or not sequence.full:
            return rows
        batch = self._tables_of([seq], [sequence.length])
        kept = self._gather(pages.full.pages, {**batch.batch, "block_table": batch.full}, sequence.length)
        is_full = self._tensor([i in sequence.full for i in range(len(sequence.table))], torch.bool)
        is_full = is_full.repeat_interleave(self.block_size)[: sequence.length]  # [length]
        first, second = (
            torch.where(is_full.reshape(-1, *[1] * (code.dim() - 1)), full, code)
            for code, full in zip(rows, kept, strict=True)
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
    def fixed_scale_bytes(self) -> int:
        """Bytes of the static scales, which the cache has once, however many tokens it holds."""
        return _fixed_scale_bytes(self.specs, self.dtype, self.kv_formats)

    @property
    def kept_bytes_per_token(self) -> int:
        """Bytes that a token kept in full precision takes besides, in all layers that have codes."""
        return sum(
            spec.bytes_per_token(self.dtype)
            for spec, pages in zip(self.specs, self.layers, strict=True)
            if pages.full is not None
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that all layers take, used or not.

        They are block_bytes for each block, fixed_scale_bytes, and kept_bytes_per_token for each token of keep_blocks.
        """
        full = [pages.full.pages for pages in self.layers if pages.full is not None]
        tensors = [
            tensor for pages in (*self.layers, *full) for tensor in (*pages.tensors, *pages.static_scales.values())
        ]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # layouts may share one

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that sequences name, those kept in full precision included; a row that several share counts
        once. Walks all block tables.
        """
        filled: dict[int, int] = {}
        kept: dict[int, int] = {}
        for sequence in self._sequences.values():
            for i, block in enumerate(sequence.table):
                rows = min(self.block_size, sequence.length - i * self.block_size)
                filled[block] = max(rows, filled.get(block, 0))
                if i in sequence.full:
                    kept[sequence.full[i]] = max(rows, kept.get(sequence.full[i], 0))
        return sum(filled.values()) * self.bytes_per_token + sum(kept.values()) * self.kept_bytes_per_token

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
                for tensor in pages.tensors:
                    ops.copy_blocks(tensor, mapping)

    def _copy_full(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in full precision (source, target) in every layer that has them."""
        if pairs:
            mapping = self._tensor(pairs, torch.int64)  # [n, 2]
            for pages in self.layers:
                for tensor in pages.full.pages.tensors if pages.full is not None else ():
                    ops.copy_blocks(tensor, mapping)

    def _to_keep(self, sequences: list[_Sequence], counts: list[int], copies: dict[int, int]) -> list[Append]:
        """What an append does to the blocks kept in full precision, for each sequence; empty where none are kept."""
        if self.kept is None:
            return []
        return [
            self.kept.append(sequence.full, sequence.length, count, i in copies)
            for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True))
        ]

    def _code_dropped(self, sequences: list[_Sequence], kept: list[Append]) -> None:
        """Code the blocks that leave full precision, in layers whose codes wait for that."""
        leaving = {
            sequence.table[i]: sequence.full[i]
            for sequence, change in zip(sequences, kept, strict=True)
            for i in change.dropped
        }
        if not leaving:
            return
        blocks, full_blocks = (self._tensor(list(ids), torch.int64) for ids in (leaving, leaving.values()))
        for pages in self.layers:
            if isinstance(pages, GqaPages) and pages.key_groups:
                kivi.code_blocks(pages, full_blocks, blocks)

    def _opens(self, sequence: _Sequence, length: int) -> bool:
        """Whether a sequence cut to `length` ends in coded groups that are no longer whole."""
        cut, rest = divmod(length, self.block_size)
        return self._key_groups and rest > 0 and cut not in sequence.full

    def _open_last(self, sequence: _Sequence) -> None:
        """Give the last block of a sequence one in full precision that holds what its codes say."""
        assert self.kept is not None
        block = sequence.table[-1]
        (full_block,) = self.kept.pool.allocate(1)
        batch = {
            "block_table": self._tensor([[block]], torch.int32),
            "cu_seqlens_q": self._tensor([0, self.block_size], torch.int32),
        }
        for pages in self.layers:
            if pages.full is not None:
                rows = self._gather(pages, batch, self.block_size)
                for target, source in zip(pages.full.pages.caches, rows, strict=True):
                    target[full_block] = source
        sequence.full[len(sequence.table) - 1] = full_block
        self._full_blocks[block] = full_block

    def _full_after(
        self, sequences: list[_Sequence], kept: list[Append], full_blocks: list[int]
    ) -> list[dict[int, int]]:
        """Each sequence's blocks in full precision after an append that got these."""
        blocks, after = iter(full_blocks), []
        for sequence, change in zip(sequences, kept, strict=False):
            full = {i: block for i, block in sequence.full.items() if i not in change.dropped}
            full.update((i, next(blocks)) for i in change.new)
            if change.copied is not None:
                full[change.copied] = next(blocks)
            after.append(full)
        return after

    def _tell_pages(
        self,
        sequences: list[_Sequence],
        kept: list[Append],
        tails: list[list[int]],
        fulls: list[dict[int, int]],
    ) -> None:
        """Note where writes to the blocks of an append, `tails`, go in full precision."""
        if self.kept is None:
            return
        told: dict[int, int] = {}
        for sequence, change in zip(sequences, kept, strict=True):
            told.update((sequence.table[i], -1) for i in change.dropped)
        for sequence, tail, full in zip(sequences, tails, fulls, strict=True):
            start = sequence.length // self.block_size
            told.update((block, full.get(start + i, -1)) for i, block in enumerate(tail))
        if told:
            self._full_blocks[self._tensor(list(told), torch.int64)] = self._tensor(list(told.values()), torch.int64)

    def _tables_of(self, seqs: Sequence[int], q_lens: Sequence[int]) -> _Tables:
        """The batch with its block table taken apart; the layers of one forward ask for the same one."""
        key = tuple(seqs), tuple(q_lens)
        if self._tables is None or self._tables[0] != key:
            batch = self.batch(seqs, q_lens)
            shape = batch["block_table"].shape
            codes, full = [], []
            for sequence in map(self._sequence, seqs):
                row = [sequence.full.get(i, -1) for i in range(shape[1])]
                full.append(row)
                codes.append(
                    [block if row[i] < 0 else -1 for i, block in enumerate(sequence.table)]
                    + [-1] * (shape[1] - len(sequence.table))
                )
            codes_table, full_table = (
                self._tensor(rows, torch.int32).reshape(shape)
                if any(max(row, default=-1) >= 0 for row in rows)
                else None
                for rows in (codes, full)
            )
            self._tables = key, _Tables(batch, codes_table, full_table)
        return self._tables[1]

    def _gather(self, pages: Pages, batch: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
        """The rows of one sequence, in the cache's dtype."""
        if isinstance(pages, DsaPages) and pages.in_records:
            return pages.unpacked(batch["block_table"][0], length, self.dtype)
        own = formats.of_dtype(str(self.dtype)).name
        found = []
        for role, arguments in zip(("key", "value"), pages.gather_arguments, strict=True):
            name = arguments["kv_format"]
            if kivi.is_kivi(name):
                blocks = batch["block_table"][0].long()
                rows = kivi.read_blocks(arguments["cache"], arguments["scale_cache"], name, role, blocks, own)[:length]
            else:
                rows = ops.gather_cache(
                    **arguments,
                    block_table=batch["block_table"],
                    cu_seqlens=batch["cu_seqlens_q"],
                    num_tokens=length,
                    out_format="auto" if name == "auto" else own,
                )
            found.append(rows)
        return found[0], found[1]

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def formats_of_layers(kv_format: KVFormats, num_layers: int) -> tuple[str, ...]:
    """The name of each layer's format; raises ArgumentError for a list of another length."""
    if isinstance(kv_format, str):
        return (kv_format,) * num_layers
    names = tuple(kv_format(layer) for layer in range(num_layers)) if callable(kv_format) else tuple(kv_format)
    if len(names) != num_layers:
        raise ArgumentError(
            f"kv_format has {len(names)} entries for {num_layers} layers; a list names one for each: pass as many, or "
            f"one name for all"
        )
    return names


def _scales_of(
    scales: Sequence[Scales | None] | None, layers: tuple[Layer, ...], dtype: torch.dtype, names: tuple[str, ...]
) -> tuple[Scales | None, ...]:
    """The scales given for each layer; raises ArgumentError for those that its format does not take."""
    given = (None,) * len(layers) if scales is None else tuple(scales)
    if len(given) != len(layers):
        raise ArgumentError(
            f"scales has {len(given)} entries for {len(layers)} layers; it has one for each: pass None where a layer "
            f"needs none"
        )
    for layer, name, layer_scales in zip(layers, names, given, strict=True):
        static_scales(layer, dtype, name, layer_scales)
    return given


def _fixed_scale_bytes(layers: tuple[Layer, ...], dtype: torch.dtype, names: tuple[str, ...]) -> int:
    """Bytes of the scales that a cache has once."""
    return sum(
        part.fixed_scale_bytes for layer, name in zip(layers, names, strict=True) for part in layer.parts(dtype, name)
    )


def _bytes_per_token(layers: tuple[Layer, ...], block_size: int, dtype: torch.dtype, names: tuple[str, ...]) -> int:
    """Bytes of one token in all layers; raises ArgumentError for sizes and formats that no cache can have."""
    if not layers:
        raise ArgumentError("layers is empty; a cache has at least one: pass a GqaLayer or MlaLayer for each layer")
    if block_size < 1:
        raise ArgumentError(f"block_size is {block_size}; it must be 1 or more: pass the tokens of one block")
    for layer, name in zip(layers, names, strict=True):
        for part in layer.parts(dtype, name):
            part.check_block_size(block_size)
    return sum(layer.bytes_per_token(dtype, name) for layer, name in zip(layers, names, strict=True))
