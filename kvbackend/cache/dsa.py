"""An MLA layer with an index key for each token (DeepSeek-V3.2, GLM-5), for PagedCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import formats, ops
from ..errors import ArgumentError
from ..layouts import empty_pages
from .layers import MlaLayer, MlaPages, Scales


@dataclass(frozen=True)
class DsaLayer(MlaLayer):
    """A layer of multi-head latent attention over tokens that an indexer selects.

    index_dim      width of an index key; 0: the layer reuses the selection of one before it
    index_format   how index keys are stored: "auto" or a record, such as index_fp8_132

    Latents are stored as they are (kv_format "auto"): records of them need pages that PagedCache does not have.
    """

    index_dim: int = 128
    index_format: str = "auto"

    def bytes_per_token(self, dtype: torch.dtype, kv_format: str = "auto") -> int:
        """Bytes of one token's latent and rotary row and of its index key, with the scales that come with them."""
        return super().bytes_per_token(dtype, kv_format) + self._index_bytes(dtype)

    def _index_bytes(self, dtype: torch.dtype) -> int:
        if self.index_dim == 0:
            return 0
        if self.index_format == "auto":
            return self.index_dim * dtype.itemsize
        return formats.record(self.index_format).row_bytes

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: str,
        kv_format: str = "auto",
        scales: Scales | None = None,
    ) -> DsaPages:
        """Pages that are not initialized; those of index keys are dense in each layout."""
        if kv_format != "auto":
            raise ArgumentError(
                f"kv_format is {kv_format!r}; sparse_mla_attention reads latents as they are, or records, which "
                f"PagedCache does not have: pass 'auto'"
            )
        rows = super().allocate(num_blocks, block_size, dtype, device, layout, kv_format, scales)
        keys = None
        if self.index_dim and self.index_format == "auto":
            keys = empty_pages(num_blocks, block_size, self.index_dim, dtype=dtype, device=device)
        elif self.index_dim:
            record = formats.record(self.index_format)
            if record.dims != (self.index_dim,):
                raise ArgumentError(
                    f"index_format is {self.index_format!r}, rows of {sum(record.dims)} numbers; index_dim is "
                    f"{self.index_dim}: choose a record of this width, or 'auto'"
                )
            keys = empty_pages(num_blocks, record.page_bytes(block_size), dtype=torch.uint8, device=device)
        return DsaPages(rows.ckv_cache, rows.kpe_cache, index_keys=keys, layer=self, block_size=block_size)


@dataclass(frozen=True, eq=False)
class DsaPages(MlaPages):
    """The pages of one DsaLayer: those of MLA, and index_keys [num_blocks, block_size, index_dim] or records, or None.

    layer, block_size   what they were allocated for
    """

    index_keys: Tensor | None = None
    layer: DsaLayer | None = None
    block_size: int = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that has a row for each block: to copy a block is to copy it in each of these."""
        return super().tensors if self.index_keys is None else (*super().tensors, self.index_keys)

    @property
    def index_arguments(self) -> dict[str, Any]:
        """What lightning_indexer and indexer_logits want to know of the index keys."""
        return {"key_cache": self.index_keys, "kv_format": self.index_format, "block_size": self.block_size}

    @property
    def index_format(self) -> str:
        """How index keys are stored."""
        assert self.layer is not None
        return self.layer.index_format

    def write_index_keys(self, slot_mapping: Tensor, keys: Tensor) -> None:
        """Write index keys [T, index_dim] to the slots of their tokens."""
        assert self.index_keys is not None
        ops.store_rows(keys, self.index_keys, slot_mapping, self.index_format, self.block_size)
