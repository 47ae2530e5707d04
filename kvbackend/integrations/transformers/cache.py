"""A transformers `Cache` whose layers are pages of `kvbackend.cache.PagedCache`.

`generate` counts in padded tokens, equal for all rows; the pages hold real tokens only. Which tokens are real is known
from the padding mask alone, and the mask reaches the attention function but not `update`. So `update` stores nothing:
it counts, leaves its layer on the key tensor, and the attention function (attention.py) does the rest. Slots and
lengths are worked out once a forward, in its first layer, before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ... import cache, formats, ops
from ...cache import GqaLayer, MlaLayer, OutOfBlocks
from ...errors import ArgumentError

NATIVE_FORMATS = ("fp32", "bf16", "fp16")
MIN_BLOCKS = 16  # of a pool that grows
HANDLE = "_kvbackend_layer"  # attribute of a key tensor: the layer that its rows belong to


class PagedLayer(CacheLayerMixin):
    """One layer of a PagedCache, as transformers sees it. It only counts; pages belong to the cache."""

    _layer_type = None  # transformers registers subclasses by this
    is_sliding = False  # windows are an argument of the op: all layers hold all tokens
    is_compileable = False
    is_croppable = True

    def __init__(self, owner: PagedCache, index: int) -> None:
        super().__init__()
        self.owner = owner
        self.index = index
        self.length = 0  # tokens, padding included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: pages come with the first forward's mask."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new rows and return them; the attention function stores them."""
        self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        others = self.owner.layers if self.index == 0 else self.owner.layers[:1]
        expected = self.length + (new if self.index else 0)
        if any(layer.length != expected for layer in others):
            raise RuntimeError(
                f"layer {self.index} holds {self.length} tokens, another layer not; an earlier forward on this cache "
                f"failed half-way: call reset() on the cache, or make a new one"
            )
        self.length += new
        setattr(key_states, HANDLE, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the mask covers, and the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens in the layer, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def offload(self) -> None:
        """Refused."""
        raise ArgumentError("offload is asked of a PagedCache; its pages stay on their device: use another cache")

    prefetch = offload


@dataclass
class Step:
    """What one forward has in common in all its layers."""

    length: int  # of the layers after this forward
    shape: tuple[int, int]  # batch, new tokens of each row
    masks: list[Tensor]  # those seen in this forward; the first one counts
    keep: Tensor | None  # [batch * new] bool, the real tokens; None: all
    slots: Tensor  # [T] of the real tokens
    batch: dict[str, Any] = field(default_factory=dict)  # arguments of the attention ops

    def rows(self, states: Tensor) -> Tensor:
        """states [batch, heads, new, dim] -> real tokens [T, heads, dim]."""
        rows = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[-1])
        return rows if self.keep is None else rows[self.keep]

    def padded(self, rows: Tensor) -> Tensor:
        """rows [T, heads, dim] -> [batch, new, heads, dim], zeros where there is padding."""
        if self.keep is not None:
            filled = rows.new_zeros(len(self.keep), *rows.shape[1:])
            filled[self.keep] = rows
            rows = filled
        return rows.reshape(*self.shape, *rows.shape[1:])


class PagedCache(Cache):
    """The keys and values of one batch, in kvbackend pages; `generate` takes it wherever it takes a `DynamicCache`.

    num_layers   layers of the model; `new_cache(model)` knows them
    block_size   tokens of a block, from 1
    num_blocks   blocks of the pool; a forward that needs more raises OutOfBlocks before it writes anything, and leaves
                 the cache as it was. None: the pool starts small and doubles
    kv_format    how tokens are stored: "fp32", "bf16" or "fp16"; "auto" is the dtype of the model's keys. Attention
                 then runs in that dtype too
    dtype        the same as a torch dtype

    `pages` is the `kvbackend.cache.PagedCache` underneath (None before the first forward), with its exact figures.
    Rows of a beam search share blocks until they differ. All layers keep all tokens: a sliding window bounds what is
    read, not what is kept. One cache holds one batch; `reset()` empties it for another.
    """

    layers: list[PagedLayer]  # type: ignore[assignment]  # the base class allows more kinds

    def __init__(
        self,
        num_layers: int,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_format: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("block_size", block_size), ("num_blocks", num_blocks)):
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {value}; it must be 1 or more: pass how many you want")
        super().__init__(layers=[PagedLayer(self, index) for index in range(num_layers)])
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = page_dtype(kv_format, dtype)
        self.pages: cache.PagedCache | None = None
        self.backends: dict[str, str | None] | None = {}  # op -> who ran its first call; None: do not ask
        self._rows: list[int] = []  # a sequence of `pages` for each row of the batch
        self._seen: Tensor | None = None  # [batch, length] bool: which tokens so far are real
        self._step: Step | None = None

    # what attention.py asks

    def step(
        self, layer: PagedLayer, spec: GqaLayer | MlaLayer, query: Tensor, mask: Tensor, dtype: torch.dtype
    ) -> Step:
        """The forward's step; the first layer that asks reserves the slots of all, or raises with nothing changed."""
        batch, new = query.shape[0], query.shape[2]
        if self._step is None or self._step.length != layer.length:
            try:
                self._step = self._begin(spec, mask, (batch, new), layer.length, dtype)
            except (ArgumentError, OutOfBlocks):
                layer.length -= new
                raise
        step = self._step
        if not any(mask is seen for seen in step.masks):
            if not torch.equal(mask, step.masks[0]):
                raise ArgumentError(
                    "attention_mask differs between layers of one forward; all layers of a PagedCache hold the same "
                    "tokens: pass one padding mask"
                )
            step.masks.append(mask)
        if self.pages is not None and spec != self.pages.specs[layer.index]:
            raise ArgumentError(
                f"layer {layer.index} has {spec}, the first one {self.pages.specs[0]}; all layers must be alike: this "
                f"model needs another cache, call unpatch(model)"
            )
        return step

    def _begin(
        self, spec: GqaLayer | MlaLayer, mask: Tensor, shape: tuple[int, int], length: int, dtype: torch.dtype
    ) -> Step:
        batch, new = shape
        if self._rows and len(self._rows) != batch:
            raise ArgumentError(
                f"the batch has {batch} rows; this cache holds {len(self._rows)}: make a cache for each batch, or "
                f"reset() it"
            )
        if mask.shape[-1] != length:
            raise ArgumentError(
                f"attention_mask covers {mask.shape[-1]} tokens; it must cover all {length}, those in the cache "
                f"included: pass the mask of the whole sequence"
            )
        real = mask[:, 0, 0].expand(batch, length)
        past = length - new
        if self._seen is not None and not torch.equal(real[:, :past], self._seen[:, :past]):
            raise ArgumentError(
                "attention_mask now calls other cached tokens padding than when they came; padding is not stored, so "
                "that cannot change: pass the mask of the earlier call, extended"
            )
        counts = real[:, past:].sum(1).tolist()
        if self.pages is None:
            num_blocks = self.num_blocks or max(MIN_BLOCKS, 2 * sum(-(-count // self.block_size) for count in counts))
            specs = [spec] * len(self.layers)
            self.pages = cache.PagedCache(specs, num_blocks, self.block_size, self.dtype or dtype, mask.device)
        if not self._rows:
            self._rows = [self.pages.new_sequence() for _ in range(batch)]
        if self.num_blocks is None:
            self._make_room(counts)
        slots = self.pages.append_batch(self._rows, counts)
        self._seen = real
        keep = None if sum(counts) == batch * new else real[:, past:].reshape(-1)
        return Step(length, shape, [mask], keep, slots, self.pages.batch(self._rows, counts))

    def _make_room(self, counts: Sequence[int]) -> None:
        """Double the pool if these tokens, and a copy of each row's last block, might not fit."""
        pages = self.pages
        assert pages is not None
        wanted = sum(-(-count // self.block_size) + 1 for count in counts)
        if wanted > pages.blocks_free:
            num_blocks = max(2 * pages.blocks_total, pages.blocks_used + wanted)
            self.pages, self._rows = moved(pages, self._rows, num_blocks)

    # what transformers asks

    def reset(self) -> None:
        """Forget all tokens; the pages stay."""
        for row in self._rows:
            assert self.pages is not None
            self.pages.free(row)
        for layer in self.layers:
            layer.length = 0
        self._rows, self._seen, self._step = [], None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, padding included, and free their blocks."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"tokens_to_remove is {tokens_to_remove}; a negative number removes that many tokens: pass "
                f"{-tokens_to_remove} to remove as many, or subtract the length to keep"
            )
        length = max(0, self.get_seq_length() + tokens_to_remove)
        for layer in self.layers:
            layer.length = length
        if self._seen is not None:
            assert self.pages is not None
            self._seen = self._seen[:, :length]
            for row, count in zip(self._rows, self._seen.sum(1).tolist(), strict=True):
                self.pages.truncate(row, min(count, self.pages.length(row)))
        self._step = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was. Blocks are shared, and copied when a row writes to one."""
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        self._take([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, in this order."""
        self._take(torch.arange(len(self._rows))[indices.cpu()].tolist())

    def _take(self, indices: Sequence[int]) -> None:
        if self.pages is None or list(indices) == list(range(len(self._rows))):
            return
        forks = [self.pages.fork(self._rows[index]) for index in indices]
        for row in self._rows:
            self.pages.free(row)
        self._rows, self._step = forks, None
        if self._seen is not None:
            self._seen = self._seen[torch.tensor(indices, device=self._seen.device)]

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first forward."""
        return len(self._rows) or -1

    # figures

    @property
    def tokens(self) -> int:
        """Real tokens of all rows; beams that share count each."""
        return sum(self.pages.length(row) for row in self._rows) if self.pages else 0

    def rows(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """A copy of what a layer holds of one row of the batch: keys and values, or MLA's latent and rotary part."""
        if self.pages is None or not 0 <= row < len(self._rows):
            raise ArgumentError(f"row is {row}; the cache holds {len(self._rows)} rows: run a forward first")
        return self.pages.read(layer, self._rows[row])

    def __repr__(self) -> str:
        return f"PagedCache({len(self.layers)} layers, {len(self._rows)} rows, {self.pages})"


def page_dtype(kv_format: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the pages; None: that of the model's keys."""
    if kv_format != "auto" and kv_format not in NATIVE_FORMATS:
        raise ArgumentError(
            f"kv_format is {kv_format!r}; pages of transformers models take auto, {', '.join(NATIVE_FORMATS)}: "
            f"choose one of these"
        )
    allowed = {getattr(torch, formats.get(name).storage): name for name in NATIVE_FORMATS}
    if dtype is not None and dtype not in allowed:
        raise ArgumentError(f"dtype is {dtype}; pages are {', '.join(map(str, allowed))}: choose one of these")
    if kv_format == "auto":
        return dtype
    wanted: torch.dtype = getattr(torch, formats.get(kv_format).storage)
    if dtype not in (None, wanted):
        raise ArgumentError(f"kv_format is {kv_format!r} but dtype is {dtype}; they must agree: pass one of the two")
    return wanted


def moved(pages: cache.PagedCache, rows: Sequence[int], num_blocks: int) -> tuple[cache.PagedCache, list[int]]:
    """The same sequences in a new cache of num_blocks, sharing what they shared; and their ids there."""
    target = cache.PagedCache(pages.specs, num_blocks, pages.block_size, pages.dtype, pages.device, pages.layout)
    lengths = [pages.length(row) for row in rows]
    old = _tables(pages, rows, lengths)
    new_rows: list[int] = []
    mapping: dict[int, int] = {}  # block of the new cache -> block of the old
    for index, length in enumerate(lengths):
        shared = [_common(old[index], other) for other in old[:index]]
        best = max(range(index), key=shared.__getitem__, default=0)
        if index and shared[best]:
            row = target.fork(new_rows[best])
            target.truncate(row, min(shared[best] * pages.block_size, length, lengths[best]))
        else:
            row = target.new_sequence()
        target.append(row, length - target.length(row))
        new_rows.append(row)
        mapping.update(zip(_tables(target, [row], [length])[0], old[index], strict=True))
    pairs = torch.tensor([(source, block) for block, source in mapping.items()], dtype=torch.int64).reshape(-1, 2)
    for before, after in zip(pages.layers, target.layers, strict=True):
        for source, copy in zip(before.caches, after.caches, strict=True):
            ops.swap_blocks(source, copy, pairs)
    return target, new_rows


def _tables(pages: cache.PagedCache, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    table = pages.batch(rows, [0] * len(rows))["block_table"].tolist()
    return [blocks[: -(-length // pages.block_size)] for blocks, length in zip(table, lengths, strict=True)]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading blocks two tables share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
