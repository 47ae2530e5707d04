"""A transformers `Cache` for sparse models, and the forward that their attention modules get.

As in cache.py, `generate` counts padded tokens and the pages hold real ones. Here the whole attention module runs
through `kvbackend.models`, so nothing is handed over by tensors: the forward itself counts, and stores.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ... import formats
from ...errors import ArgumentError
from .cache import MIN_BLOCKS, CountingLayer
from .families import Family, Tables


class SparseLayer(CountingLayer):
    """One layer of a SparseCache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: only the forward of a patched module stores."""
        raise ArgumentError("a SparseCache is given to a model that is not patched; call patch(model) first")


@dataclass
class Step:
    """What one forward has in common in all its layers."""

    length: int  # of the layers after this forward
    mask: Tensor
    keep: Tensor  # [batch * new] bool: the real tokens
    batch: Any


class SparseCache(Cache):
    """Everything that one batch of a sparse model caches, in kvbackend's pages.

    family       of the model
    block_size   tokens of a block; DeepSeek-V4 rounds it up to a multiple of its compression rates
    num_blocks   blocks of the pool; None: the pool starts small and doubles
    kv_format    "auto": rows in the model's dtype. Or the record that holds them: v32_fp8_656 (DeepSeek-V3.2, GLM-5),
                 v4_fp8_584 (DeepSeek-V4, window and compressed rows), with index keys in the record beside it

    `pages` is the cache underneath, None before the first forward. Beams share blocks until they
    differ. One cache holds one batch; `reset()` empties it for another.
    """

    layers: list[SparseLayer]  # type: ignore[assignment]  # the base class allows more kinds

    def __init__(
        self, family: Family, block_size: int = 16, num_blocks: int | None = None, kv_format: str = "auto"
    ) -> None:
        if kv_format != "auto" and formats.record(kv_format).holds != family.holds:
            fitting = [name for name in formats.record_names() if formats.record(name).holds == family.holds]
            raise ArgumentError(
                f"kv_format is {kv_format!r}, whose records hold {formats.record(kv_format).holds}; this model caches "
                f"{family.holds}: choose 'auto' or one of {', '.join(fitting)}"
            )
        super().__init__(layers=[SparseLayer() for _ in family.modules])
        self.family = family
        self.block_size = family.block_size(block_size)
        self.num_blocks, self.kv_format = num_blocks, kv_format
        self.tables = Tables(family.rotary)
        self.pages: Any = None
        self._rows: list[int] = []  # a sequence of `pages` for each row of the batch
        self._seen: Tensor | None = None  # [batch, length] bool: which tokens so far are real
        self._step: Step | None = None

    def run(self, index: int, hidden: Tensor, mask: Tensor, selected: Any) -> tuple[Tensor, Any]:
        """Layer `index` on hidden [batch, new, hidden_size]; padding gives zeros."""
        step = self._begin(index, hidden, mask)
        rows = hidden.flatten(0, 1)[step.keep]
        with torch.no_grad():
            out, selected = self.family.run(index, rows, self.pages, step.batch, self.tables, selected)
        padded = hidden.new_zeros(len(step.keep), out.shape[-1])
        padded[step.keep] = out
        return padded.view(*hidden.shape[:2], -1), selected

    def _begin(self, index: int, hidden: Tensor, mask: Tensor) -> Step:
        """The forward's step; its first layer makes room for all, or raises with nothing changed."""
        new = hidden.shape[1]
        length = self.layers[index].length + new
        if index == 0:
            self._step = self._room(hidden, mask, length)
        step = self._step
        if step is None or step.length != length:
            raise RuntimeError(
                f"layer {index} holds {length - new} tokens, the first one not; an earlier forward on this cache "
                f"failed half-way: call reset() on the cache, or make a new one"
            )
        self.layers[index].length = length
        return step

    def _room(self, hidden: Tensor, mask: Tensor, length: int) -> Step:
        batch, new = hidden.shape[:2]
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
        wanted = sum(-(-count // self.block_size) + 1 for count in counts)  # and a copy of each row's last block
        if self.pages is None:
            num_blocks = self.num_blocks or max(MIN_BLOCKS, 2 * wanted)
            sizes = batch, num_blocks, self.block_size, hidden.dtype, hidden.device
            self.pages = self.family.new_pages(*sizes, self.kv_format)
        if not self._rows:
            self._rows = [self.pages.new_sequence() for _ in range(batch)]
        pool = self.pages.pool
        if self.num_blocks is None and wanted > pool.num_free:
            self.pages.grow(max(2 * pool.num_blocks, pool.num_used + wanted))
        found = self.family.begin(self.pages, self._rows, counts)
        self._seen = real
        return Step(length, mask, real[:, past:].reshape(-1), found)

    # what transformers asks

    def reset(self) -> None:
        """Forget all tokens; the pages stay."""
        for row in self._rows:
            self.pages.free(row)
        for layer in self.layers:
            layer.length = 0
        self._rows, self._seen, self._step = [], None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, padding included; ArgumentError where rings lost too much."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"tokens_to_remove is {tokens_to_remove}; a negative number removes that many tokens: pass "
                f"{-tokens_to_remove} to remove as many, or subtract the length to keep"
            )
        length = max(0, self.get_seq_length() + tokens_to_remove)
        if self._seen is not None:
            seen = self._seen[:, :length]
            for row, count in zip(self._rows, seen.sum(1).tolist(), strict=True):
                self.pages.truncate(row, count)
            self._seen = seen
        for layer in self.layers:
            layer.length = length
        self._step = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was. Blocks are shared, and copied when a row writes to one."""
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused after the first forward: there is room for so many rows only."""
        raise ArgumentError("the rows of a SparseCache cannot become more; repeat the inputs before the first forward")

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

    def __repr__(self) -> str:
        return f"SparseCache({len(self.layers)} layers, {len(self._rows)} rows)"


def forward(
    family: Family,
    index: int,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    prev_topk_indices: Any = None,
    **_: Any,
) -> tuple[Any, ...]:
    """Stands in for the forward of an attention module; positions follow from the mask, RoPE from the model's tables.

    A forward without a cache runs over pages that live for this call.
    """
    module = family.modules[index]
    if attention_mask is None or attention_mask.dtype is not torch.bool or attention_mask.shape[1:3] != (1, 1):
        raise ArgumentError(
            "attention_mask is not kvbackend's padding mask, torch.bool [batch, 1, 1, tokens]; padding would be read "
            "as text: pass the 2D mask of the tokenizer, or call unpatch(model)"
        )
    if module.training and module.attention_dropout:
        raise ArgumentError(f"dropout is {module.attention_dropout}; cached attention has none: call model.eval()")
    layer = index
    if cache is None:
        cache, layer = SparseCache(type(family)(family.rotary, [module])), 0
    if not isinstance(cache, SparseCache):
        raise ArgumentError(
            f"cache is a {type(cache).__name__}; a patched sparse model takes a SparseCache: pass new_cache(model), or "
            f"call unpatch(model)"
        )
    out, selected = cache.run(layer, hidden_states, attention_mask, prev_topk_indices)
    return (out, None, selected) if module.config.model_type == "glm_moe_dsa" else (out, None)


def patch(family: Family) -> None:
    """Give the model's attention modules our forward."""
    for index, module in enumerate(family.modules):
        vars(module)["forward"] = functools.partial(forward, family, index)


def unpatch(model: nn.Module) -> None:
    """Take it back."""
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, functools.partial) and own.func is forward:
            del vars(module)["forward"]
