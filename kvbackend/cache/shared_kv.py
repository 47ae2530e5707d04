"""What a layer of DeepSeek-V4 or V4.1 keeps: window, compressed rows, index keys and open groups, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from .. import formats, ops
from ..codecs.records import pack_record, unpack_record
from ..errors import ArgumentError
from ..layouts import empty_pages
from ..typed import check_fields, checked, need_sizes


@dataclass(frozen=True)
class SharedKvLayer:
    """One attention layer whose rows are key and value of every head.

    compress_ratio    tokens of a compressed row; 0: the layer has its window only
    overlap           a row pools the group before its own too
    index_dim         width of an index key of each compressed row; 0: it has none
    compresses_index  index keys have a compressor, and an open group, of their own (V4); else they are made from rows
    source            index of the layer whose compressed rows and index keys this one reads; None: its own
    """

    compress_ratio: int = 0
    overlap: bool = False
    index_dim: int = 0
    compresses_index: bool = False
    source: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        need_sizes(self, 0, compress_ratio=self.compress_ratio, index_dim=self.index_dim, source=self.source or 0)

    @property
    def span(self) -> int:
        """Tokens that one compressed row pools."""
        return self.compress_ratio * (2 if self.overlap else 1)

    @property
    def open_tokens(self) -> int:
        """Earlier tokens that the next one may need: those of a row but the last. 0 where nothing is pooled."""
        return 0 if self.source is not None else max(self.span - 1, 0)


@checked
def deepseek_v4_layers(compress_ratios: Sequence[int], index_dim: int = 128) -> list[SharedKvLayer]:
    """The layers of DeepSeek-V4 by its config's compress_ratios: 0 window only, 4 CSA with an indexer, others HCA."""
    return [
        SharedKvLayer(ratio, True, index_dim, True) if ratio == 4 else SharedKvLayer(ratio) for ratio in compress_ratios
    ]


@checked
def deepseek_v41_layers(
    compress_ratios: Sequence[int], kv_source_layer_ids: Sequence[int], index_dim: int = 128
) -> list[SharedKvLayer]:
    """The layers of DeepSeek-V4.1: a compressed one reads the rows of the last source that is not above it."""
    layers = []
    for index, ratio in enumerate(compress_ratios):
        if ratio == 0:
            layers.append(SharedKvLayer())
            continue
        source = max((at for at in kv_source_layer_ids if at <= index), default=None)
        if source is None or compress_ratios[source] != ratio:
            raise ArgumentError(
                f"kv_source_layer_ids is {list(kv_source_layer_ids)}; layer {index} has compress_ratio {ratio} and "
                f"needs a source of that ratio at or before it: correct kv_source_layer_ids or compress_ratios"
            )
        layers.append(SharedKvLayer(ratio, False, index_dim, source=None if source == index else source))
    return layers


@dataclass(frozen=True)
class Sizes:
    """What all layers of a cache have in common; the arguments of SharedKvCache, which says what they mean."""

    num_blocks: int
    block_size: int
    num_sequences: int
    dtype: torch.dtype
    device: torch.device
    head_dim: int
    window: int
    rewind: int
    window_format: str
    kv_format: str
    index_format: str

    @property
    def window_rows(self) -> int:
        """Rows of a ring: the window of the next token, itself excluded, and tokens that may be taken back."""
        return max(self.window - 1 + self.rewind, 1)

    @property
    def state_dtype(self) -> torch.dtype:
        """Of open groups."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def row_bytes(self, kv_format: str, width: int) -> int:
        """Bytes of one row, records without the padding of their pages."""
        return self.dtype.itemsize * width if kv_format == "auto" else formats.record(kv_format).row_bytes

    def pages(self, count: int, rows: int, width: int, kv_format: str) -> Tensor:
        """Pages that are not initialized."""
        if kv_format == "auto":
            return empty_pages(count, rows, width, dtype=self.dtype, device=self.device)
        record = formats.record(kv_format)
        if sum(record.dims) != width:
            raise ArgumentError(
                f"format {kv_format!r} holds rows of {sum(record.dims)} numbers; these have {width}: choose a record "
                f"of this width, or 'auto'"
            )
        return empty_pages(count, record.page_bytes(rows), dtype=torch.uint8, device=self.device)

    def ring(self, layer: SharedKvLayer, width: int) -> Tensor | None:
        """The open groups of one compressor."""
        if layer.open_tokens == 0:
            return None
        columns = 2 * width * (2 if layer.overlap else 1)
        rows = layer.open_tokens + self.rewind
        return torch.empty(self.num_sequences, rows, columns, dtype=self.state_dtype, device=self.device)


@dataclass(frozen=True)
class SharedKvPages:
    """The memory of one layer. Those of a layer with a source are the source's own tensors, its window excepted.

    window        one ring for each sequence, see ops.shared_kv_attention
    compressed    pages [num_blocks, block_size / compress_ratio, head_dim] or records; None: window only
    index_keys    pages [num_blocks, block_size / compress_ratio, index_dim] or records; None: it has none
    state         open group of each sequence [num_sequences, ring, ...], see ops.compress_kv; None: nothing is pooled
    index_state   the same of the index keys' own compressor
    """

    layer: SharedKvLayer
    sizes: Sizes
    window: Tensor
    compressed: Tensor | None = None
    index_keys: Tensor | None = None
    state: Tensor | None = None
    index_state: Tensor | None = None

    @classmethod
    def allocate(cls, layer: SharedKvLayer, sizes: Sizes, earlier: Sequence[SharedKvPages]) -> SharedKvPages:
        """Pages of a layer after those of the layers before it."""
        window = sizes.pages(sizes.num_sequences, sizes.window_rows, sizes.head_dim, sizes.window_format)
        if layer.source is not None:
            if layer.source >= len(earlier):
                raise ArgumentError(
                    f"source of layer {len(earlier)} is {layer.source}; a layer reads the rows of one before it: pass "
                    f"an index below {len(earlier)}"
                )
            owner = earlier[layer.source]
            return replace(owner, layer=layer, window=window, state=None, index_state=None)
        if layer.compress_ratio == 0:
            return cls(layer, sizes, window)
        rows = sizes.block_size // layer.compress_ratio
        return cls(
            layer,
            sizes,
            window,
            sizes.pages(sizes.num_blocks, rows, sizes.head_dim, sizes.kv_format),
            sizes.pages(sizes.num_blocks, rows, layer.index_dim, sizes.index_format) if layer.index_dim else None,
            sizes.ring(layer, sizes.head_dim),
            sizes.ring(layer, layer.index_dim) if layer.compresses_index else None,
        )

    def grown(self, sizes: Sizes, earlier: Sequence[SharedKvPages]) -> SharedKvPages:
        """The same rows in more blocks, after the grown pages of the layers before it."""
        if self.layer.source is not None:
            owner = earlier[self.layer.source]
            return replace(self, sizes=sizes, compressed=owner.compressed, index_keys=owner.index_keys)

        def enlarged(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            larger = tensor.new_empty(sizes.num_blocks, *tensor.shape[1:])
            larger[: len(tensor)] = tensor
            return larger

        return replace(self, sizes=sizes, compressed=enlarged(self.compressed), index_keys=enlarged(self.index_keys))

    @property
    def entries(self) -> int:
        """Compressed rows of a block."""
        return self.sizes.block_size // self.layer.compress_ratio

    @property
    def by_block(self) -> list[Tensor]:
        """The tensors it owns whose first dim is blocks."""
        return [] if self.layer.source is not None else _present(self.compressed, self.index_keys)

    @property
    def by_sequence(self) -> list[Tensor]:
        """The tensors it owns whose first dim is sequences."""
        return _present(self.window, self.state, self.index_state)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes by which one more token makes the rows it owns grow."""
        if self.layer.source is not None or self.layer.compress_ratio == 0:
            return Fraction(0)
        row = self.sizes.row_bytes(self.sizes.kv_format, self.sizes.head_dim)
        if self.layer.index_dim:
            row += self.sizes.row_bytes(self.sizes.index_format, self.layer.index_dim)
        return Fraction(row, self.layer.compress_ratio)

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of a sequence's open groups."""
        states = _present(self.state, self.index_state)
        return sum(state.shape[1] * state.shape[2] * state.element_size() for state in states)

    @property
    def window_bytes_per_sequence(self) -> int:
        """Bytes of a sequence's ring, records without the padding of its page."""
        return self.sizes.window_rows * self.sizes.row_bytes(self.sizes.window_format, self.sizes.head_dim)

    @property
    def compress_arguments(self) -> dict[str, Any]:
        """What ops.compress_kv wants to know of the layer."""
        return dict(compress_ratio=self.layer.compress_ratio, overlap=self.layer.overlap, block_size=self.entries)

    @property
    def attention_arguments(self) -> dict[str, Any]:
        """What ops.shared_kv_attention wants to know of the layer."""
        window = dict(window_cache=self.window, window=self.sizes.window, window_format=self.sizes.window_format)
        if self.compressed is None:
            return window
        compressed = dict(compressed_cache=self.compressed, kv_format=self.sizes.kv_format)
        return {**window, **compressed, "compress_ratio": self.layer.compress_ratio}

    @property
    def index_arguments(self) -> dict[str, Any]:
        """What ops.lightning_indexer and ops.candidate_blocks want to know of the layer."""
        known = dict(compress_ratio=self.layer.compress_ratio, kv_format=self.sizes.index_format)
        return {"key_cache": self.index_keys, "block_size": self.entries, **known}

    def as_stored(self, kv: Tensor) -> Tensor:
        """Window rows [T, head_dim] as the ring gives them back: what the tokens of the same call must see."""
        return as_stored(kv, self.sizes.window_format)

    def write_window(self, kv: Tensor, slots: Tensor) -> None:
        """Write rows [T, head_dim] to the rings, after the attention of their call."""
        ops.store_rows(kv, self.window, slots, self.sizes.window_format, _rows_of(self.sizes.window_format, self.sizes))

    def write_compressed(self, rows: Tensor, slots: Tensor) -> None:
        """Write compressed rows [R, head_dim] to the slots that compress_kv returned."""
        assert self.compressed is not None
        ops.store_rows(rows, self.compressed, slots, self.sizes.kv_format, self.entries)

    def write_index_keys(self, keys: Tensor, slots: Tensor) -> None:
        """Write index keys [R, index_dim] to the slots that compress_kv returned."""
        assert self.index_keys is not None
        ops.store_rows(keys, self.index_keys, slots, self.sizes.index_format, self.entries)


def as_stored(rows: Tensor, kv_format: str) -> Tensor:
    """Rows [T, width] rounded to what a format holds: what reading them back gives."""
    if kv_format == "auto":
        return rows
    return unpack_record(pack_record(rows[:, None], kv_format), kv_format, 1, rows.dtype)[:, 0]


def _rows_of(kv_format: str, sizes: Sizes) -> int:
    return -1 if kv_format == "auto" else sizes.window_rows


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
