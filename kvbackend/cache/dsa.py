"""An MLA layer with an index key for each token (DeepSeek-V3.2, GLM-5), for PagedCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import formats, ops
from ..codecs.records import unpack_record
from ..errors import ArgumentError
from ..layouts import empty_pages
from ..typed import need_sizes
from .layers import MlaLayer, MlaPages, PageSizes, Scales
from .parts import Part


@dataclass(frozen=True)
class DsaLayer(MlaLayer):
    """A layer of multi-head latent attention over tokens that an indexer selects.

    index_dim       width of an index key; 0: the layer reuses the selection of one before it
    index_format    how index keys are stored: "auto" or a record, such as index_fp8_132
    latent_format   how latent and rotary rows are stored: "auto" or a record of both, such as v32_fp8_656
    """

    index_dim: int = 128
    index_format: str = "auto"
    latent_format: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        need_sizes(self, 0, index_dim=self.index_dim)

    def parts(self, dtype: torch.dtype, kv_format: str = "auto") -> tuple[Part, Part]:
        """As the base's; a kv_format, which has codes and scales apart, is refused."""
        if kv_format != "auto":
            raise ArgumentError(
                f"kv_format is {kv_format!r}; sparse_mla_attention reads latents as they are, or records: pass 'auto', "
                f"or latent_format='v32_fp8_656' to the layer"
            )
        return super().parts(dtype)

    def bytes_per_token(self, dtype: torch.dtype, kv_format: str = "auto") -> int:
        """Bytes of one token's latent and rotary row and of its index key, with the scales that come with them."""
        latents = super().bytes_per_token(dtype, kv_format)
        if self.latent_format != "auto":
            latents = formats.record(self.latent_format).row_bytes
        return latents + self._index_bytes(dtype)

    def _index_bytes(self, dtype: torch.dtype) -> int:
        if self.index_dim == 0:
            return 0
        if self.index_format == "auto":
            return self.index_dim * dtype.itemsize
        return formats.record(self.index_format).row_bytes

    def allocate(self, sizes: PageSizes, kv_format: str = "auto", scales: Scales | None = None) -> DsaPages:
        """Pages that are not initialized; records and index keys are dense in each layout."""
        self.parts(sizes.dtype, kv_format)
        keys = None
        if self.index_dim and self.index_format == "auto":
            shape = sizes.num_blocks, sizes.block_size, self.index_dim
            keys = empty_pages(*shape, dtype=sizes.dtype, device=sizes.device)
        elif self.index_dim:
            keys = _records("index_format", self.index_format, (self.index_dim,), "index_dim", sizes)
        if self.latent_format == "auto":
            rows = super().allocate(sizes, kv_format, scales)
            ckv_cache, kpe_cache = rows.caches
        else:
            dims = self.kv_lora_rank, self.qk_rope_head_dim
            ckv_cache = _records("latent_format", self.latent_format, dims, "kv_lora_rank and qk_rope_head_dim", sizes)
            kpe_cache = ckv_cache[:, :0]
        return DsaPages(ckv_cache, kpe_cache, index_keys=keys, layer=self, block_size=sizes.block_size)


def _records(argument: str, name: str, dims: tuple[int, ...], whose: str, sizes: PageSizes) -> Tensor:
    """Pages of records whose rows have these dims."""
    record = formats.record(name)
    if record.dims != dims:
        raise ArgumentError(
            f"{argument} is {name!r}, rows of {' and '.join(map(str, record.dims))} numbers; {whose} "
            f"{'is' if len(dims) == 1 else 'are'} {' and '.join(map(str, dims))}: choose a record of this width, or "
            f"'auto'"
        )
    return empty_pages(sizes.num_blocks, record.page_bytes(sizes.block_size), dtype=torch.uint8, device=sizes.device)


@dataclass(frozen=True, eq=False)
class DsaPages(MlaPages):
    """The pages of one DsaLayer: those of MLA, and index_keys [num_blocks, block_size, index_dim] or records, or None.

    ckv_cache, kpe_cache   as in MlaPages; or records of both [num_blocks, page_bytes], and nothing
    layer, block_size      what they were allocated for
    """

    index_keys: Tensor | None = None
    layer: DsaLayer | None = None
    block_size: int = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that has a row for each block: to copy a block is to copy it in each of these."""
        rows = (self.ckv_cache,) if self.in_records else super().tensors
        return rows if self.index_keys is None else (*rows, self.index_keys)

    @property
    def in_records(self) -> bool:
        """Whether latent and rotary rows are records."""
        return self.latent_format != "auto"

    @property
    def latent_format(self) -> str:
        """How latent and rotary rows are stored."""
        assert self.layer is not None
        return self.layer.latent_format

    @property
    def index_format(self) -> str:
        """How index keys are stored."""
        assert self.layer is not None
        return self.layer.index_format

    @property
    def attention_arguments(self) -> dict[str, Any]:
        """What sparse_mla_attention wants to know of the latent and rotary rows."""
        kpe_cache = None if self.in_records else self.kpe_cache
        rows = dict(ckv_cache=self.ckv_cache, kpe_cache=kpe_cache, kv_format=self.latent_format)
        return rows | dict(block_size=self.block_size if self.in_records else -1)

    @property
    def index_arguments(self) -> dict[str, Any]:
        """What lightning_indexer and indexer_logits want to know of the index keys."""
        return {"key_cache": self.index_keys, "kv_format": self.index_format, "block_size": self.block_size}

    def write(self, slot_mapping: Tensor, ckv: Tensor, kpe: Tensor) -> None:
        """Write rows [T, kv_lora_rank | qk_rope_head_dim] to their slots."""
        if not self.in_records:
            return super().write(slot_mapping, ckv, kpe)
        rows = torch.cat((ckv, kpe), -1)
        return ops.store_rows(rows, self.ckv_cache, slot_mapping, self.latent_format, self.block_size)

    def write_index_keys(self, slot_mapping: Tensor, keys: Tensor) -> None:
        """Write index keys [T, index_dim] to the slots of their tokens."""
        assert self.index_keys is not None
        ops.store_rows(keys, self.index_keys, slot_mapping, self.index_format, self.block_size)

    def unpacked(self, blocks: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first `length` latent and rotary rows of these blocks, out of records."""
        pages = self.ckv_cache[blocks.long().clamp(min=0)]
        rows = unpack_record(pages, self.latent_format, self.block_size, dtype).flatten(0, 1)[:length]
        ckv, kpe = rows.split(formats.record(self.latent_format).dims, -1)
        return ckv.contiguous(), kpe.contiguous()
