"""A transformers `Cache` whose layers are pages of `kvbackend.cache.PagedCache`.

`generate` counts in padded tokens, equal for all rows; the pages hold real tokens only. Which tokens are real is known
from the padding mask alone, and the mask reaches the attention function but not `update`. So `update` stores nothing:
it counts, leaves its layer on the key tensor, and the attention function (attention.py) does the rest. Slots and
lengths are worked out once a forward, in its first layer, before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ... import cache
from ...cache import GqaLayer, MlaLayer, OutOfBlocks
from ...dispatch import explain
from ...errors import ArgumentError
from .store import Options, Store

MIN_BLOCKS = 16  # of a pool that grows
HANDLE = "_kvbackend_layer"  # attribute of a key tensor: the layer that its rows belong to


class CountingLayer(CacheLayerMixin):
    """One layer of a cache, as transformers sees it. It counts tokens, padding included; pages belong to the cache."""

    _layer_type = None  # transformers registers subclasses by this
    is_sliding = False  # windows are an argument of the op: all layers hold all tokens
    is_compileable = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: pages come with the first forward."""
        self.is_initialized = True

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
        raise ArgumentError(
            "offload is asked of a cache of kvbackend; its pages stay on their device: use another cache"
        )

    prefetch = offload


class PagedLayer(CountingLayer):
    """One layer of a PagedCache."""

    def __init__(self, owner: PagedCache, index: int) -> None:
        super().__init__()
        self.owner = owner
        self.is_croppable = owner.options.evict is None
        self.index = index

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


@dataclass
class Step:
    """What one forward has in common in all its layers."""

    length: int  # of the layers after this forward
    shape: tuple[int, int]  # batch, new tokens of each row
    masks: list[Tensor]  # those seen in this forward; the first one counts
    keep: Tensor | None  # [batch * new] bool, the real tokens; None: all
    checked: bool = False  # whether its positions were compared with the model's

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
    num_blocks   blocks of the pool (for each layer where layers keep different numbers of tokens); a forward that needs
                 more raises OutOfBlocks before it writes anything, and leaves the cache as it was. None: the pool
                 starts small and doubles
    kv_format    how tokens are stored: a name of `kvbackend.formats`, two with a slash for keys and values, or a list
                 with one for each layer; "auto" is the dtype of the model's keys
    dtype        of rows that are not codes; attention runs in it too. None: that of the model's keys, or of the plain
                 format ("fp32", "bf16", "fp16") that kv_format names
    scales, keep_recent, keep_sinks   as in `kvbackend.cache.PagedCache`
    evict        a policy of `kvbackend.compress`. One that decides once does so before the first forward of one token;
                 the others after every forward
    summary_slots, slack   as in `kvbackend.compress.EvictingCache`
    low_rank     a Calibration, or a pair of projections (keys, values) for each layer
    sparse       a `kvbackend.cache.Sparsity`: decode steps attend to the tokens that they choose. Layers with a sliding
                 window do not choose; beams learn their pages anew when they change places
    sparse_prompt   queries of a prompt choose too
    dense_below  as in `kvbackend.cache.SparseAttention`, which is `store.sparse`
    timed        add up seconds of each of `kvbackend.cache.stages` in `store.stages.seconds`; waits for the device
    rope_cos_sin the model's table [P, rotary_dim], for low rank and StreamingLLM; `new_cache(model)` knows it

    Tokens are evicted, then projected, then stored in the format.
    `pages` is the `kvbackend.cache.PagedCache` underneath (None before the first forward), with its exact figures.
    Rows of a beam search share blocks until they differ. All layers keep all tokens unless a policy evicts: a sliding
    window bounds what is read, not what is kept. One cache holds one batch; `reset()` empties it for another.
    """

    layers: list[PagedLayer]  # type: ignore[assignment]  # the base class allows more kinds

    def __init__(self, num_layers: int, **options: Any) -> None:
        unknown = sorted(set(options) - set(Options.names()))
        if unknown:
            raise ArgumentError(
                f"PagedCache has no option {', '.join(unknown)}; its options are {', '.join(Options.names())}: choose "
                f"among these"
            )
        self.options = Options(**options)
        super().__init__(layers=[PagedLayer(self, index) for index in range(num_layers)])
        self.store: Store | None = None
        self.backends: dict[str, str | None] | None = {}  # op -> who ran its first call; None: do not ask
        self._seen: Tensor | None = None  # [batch, length] bool: which tokens so far are real
        self._step: Step | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.options.block_size

    @property
    def pages(self) -> cache.PagedCache | None:
        """The pages; None before the first forward."""
        return None if self.store is None else self.store.pages

    @property
    def _rows(self) -> list[int]:
        return [] if self.store is None else self.store.rows

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
        if self.store is not None and spec != self.store.spec:
            raise ArgumentError(
                f"layer {layer.index} has {spec}, the first one {self.store.spec}; all layers must be alike: this "
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
        if self.store is None:
            size, given = self.options.block_size, self.options.num_blocks
            num_blocks = given or max(MIN_BLOCKS, 2 * sum(-(-count // size) for count in counts))
            page_dtype = self.options.page_dtype() or dtype
            sizes = spec, len(self.layers), num_blocks, page_dtype, mask.device
            self.store = Store(self.options, *sizes, self.note)
        if new == 1 and self._decides_once:
            self.store.evict()
        self.store.append(counts, grows=self.options.num_blocks is None)
        self._seen = real
        keep = None if sum(counts) == batch * new else real[:, past:].reshape(-1)
        return Step(length, shape, [mask], keep)

    @property
    def _decides_once(self) -> bool:
        return self.options.evict is not None and self.options.evict.once

    def end_forward(self) -> None:
        """After the last layer: policies that evict whenever they can do so now."""
        if self.store is not None and self.options.evict is not None and not self._decides_once:
            self.store.evict()

    def evict(self) -> int:
        """Let the policy decide now, as it does by itself before the first forward of one token; blocks freed."""
        return 0 if self.store is None else self.store.evict()

    def note(self, name: str, arguments: dict[str, Any]) -> None:
        """Note who runs an op, at its first call."""
        if self.backends is not None and name not in self.backends:
            self.backends[name] = explain(name, **arguments).chosen

    # what transformers asks

    def reset(self) -> None:
        """Forget all tokens; the pages stay."""
        if self.store is not None:
            for row in self.store.rows:
                self.store.free(row)
            self.store.rows = []
        for layer in self.layers:
            layer.length = 0
        self._seen, self._step = None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, padding included, and free their blocks."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"tokens_to_remove is {tokens_to_remove}; a negative number removes that many tokens: pass "
                f"{-tokens_to_remove} to remove as many, or subtract the length to keep"
            )
        if tokens_to_remove and self.options.evict is not None:
            raise ArgumentError(
                f"tokens_to_remove is {tokens_to_remove} in a cache that evicts; what was evicted for these tokens "
                f"would not come back: generate without drafts and lookup, or without evict"
            )
        length = max(0, self.get_seq_length() + tokens_to_remove)
        for layer in self.layers:
            layer.length = length
        if self._seen is not None and self.options.evict is None:
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
        if self.store is None or list(indices) == list(range(len(self._rows))):
            return
        sequences = self.store.sequences
        forks = [sequences.fork(self._rows[index]) for index in indices]
        for row in self._rows:
            self.store.free(row)
        self.store.rows, self._step = forks, None
        if self._seen is not None:
            self._seen = self._seen[torch.tensor(indices, device=self._seen.device)]

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first forward."""
        return len(self._rows) or -1

    # figures

    @property
    def tokens(self) -> int:
        """Real tokens of all rows, evicted ones included; beams that share count each."""
        return sum(self.store.tokens(row) for row in range(len(self._rows))) if self.store else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the blocks in use, with scales, full-precision copies, positions and biases."""
        return self.store.cache_bytes if self.store else 0

    @property
    def cache_bytes_fp16(self) -> int:
        """Bytes of the blocks that the same text would take in fp16, nothing evicted."""
        if self.store is None:
            return 0
        size = self.block_size
        blocks = sum(-(-self.store.tokens(row) // size) for row in range(len(self._rows)))
        return blocks * size * self.bytes_per_token_fp16

    @property
    def bytes_per_token_fp16(self) -> int:
        """Bytes of a token in all layers in fp16, nothing projected."""
        return self.store.spec.bytes_per_token(torch.float16) * len(self.layers) if self.store else 0

    def rows(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """A copy of what a layer holds of one row of the batch: keys and values, or MLA's latent and rotary part; as
        they are stored, low-rank ones included."""
        if self.store is None or not 0 <= row < len(self._rows):
            raise ArgumentError(f"row is {row}; the cache holds {len(self._rows)} rows: run a forward first")
        return self.store.read(layer, row)

    def __repr__(self) -> str:
        return f"PagedCache({len(self.layers)} layers, {len(self._rows)} rows, {self.pages})"
