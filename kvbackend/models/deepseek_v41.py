"""The attention layer of DeepSeek-V4.1 (CSA2): few layers own compressed rows, few more select, the rest reuse.

Parameters have the names of the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import SharedKvBatch, SharedKvPages
from ..errors import ArgumentError
from ..typed import check_fields, checked, need_sizes
from ._parts import GroupedLinear, RmsNorm, Rotary, SharedKvConfig, accurate, attend, compress, linear
from .deepseek_v4 import index_query, select


@dataclass(frozen=True)
class Role:
    """What a layer does besides attending.

    compress_ratio       tokens of a compressed row; 0: it attends to its window only
    owns_rows            it compresses, and makes index keys (modes Full); others read their source's
    selects              it has an indexer (Full, Reindex); others reuse the last selection
    makes_candidates     it publishes the blocks that later selections are limited to
    limited              its selection is
    """

    compress_ratio: int = 0
    owns_rows: bool = False
    selects: bool = False
    makes_candidates: bool = False
    limited: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        need_sizes(self, 1 if self.owns_rows else 0, compress_ratio=self.compress_ratio)
        if self.owns_rows and not self.selects:
            raise ArgumentError(
                "owns_rows of Role is True and selects is False; a source of rows makes index keys, which its indexer "
                "does: let it select"
            )


@checked
def roles(
    compress_ratios: Sequence[int],
    kv_source_layer_ids: Sequence[int],
    index_source_layer_ids: Sequence[int],
    candidate_source_layer_id: int | None,
) -> list[Role]:
    """The role of each layer, by the fields of the model's config."""
    last = candidate_source_layer_id
    return [
        Role(
            ratio,
            ratio > 0 and index in kv_source_layer_ids,
            ratio > 0 and index in index_source_layer_ids,
            index == last,
            last is not None and index > last and index in index_source_layer_ids,
        )
        for index, ratio in enumerate(compress_ratios)
    ]


@dataclass
class Selection:
    """What layers of one forward hand on: make a new one for each.

    topk_indices   [T, index_topk] entries, of the last layer that selected
    candidates     [T, num_candidates] blocks of entries, of the candidate source
    """

    topk_indices: Tensor | None = None
    candidates: Tensor | None = None


class DeepseekV41Attention(nn.Module):
    """One attention layer over a SharedKvCache, for prefill, chunks of it, decode, and batches of all of these.

    config                 sizes; rms_norm_eps is 1e-20 in the published model
    role                   one of `roles`
    candidate_topk_blocks, candidate_block_size   of the two-level selection

    Activations are not quantized before projections: that belongs to the linear layers that an engine puts in.
    Image spans, which widen the window in prefill, are left out: their exact rule is not public.
    Source: DeepSeek-V4.1 (arXiv 2609.19969) inference code, with one exception: its decode scores ratio-2 sources with
    an open group against the keys that another layer published last; here each source scores its own, as in prefill.
    """

    @checked
    def __init__(
        self, config: SharedKvConfig, role: Role, candidate_topk_blocks: int = 2048, candidate_block_size: int = 8
    ) -> None:
        super().__init__()
        need_sizes(self, candidate_topk_blocks=candidate_topk_blocks, candidate_block_size=candidate_block_size)
        self.config, self.role = config, role
        self.candidate_topk_blocks, self.candidate_block_size = candidate_topk_blocks, candidate_block_size
        heads, dim, eps = config.num_heads, config.head_dim, config.rms_norm_eps
        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RmsNorm(config.q_lora_rank, eps)
        self.wq_b = linear(config.q_lora_rank, heads * dim)
        self.wkv = linear(config.hidden_size, dim)
        self.kv_norm = RmsNorm(dim, eps)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = GroupedLinear(config.o_groups, heads * dim // config.o_groups, config.o_lora_rank)
        self.wo_b = linear(config.o_groups * config.o_lora_rank, config.hidden_size)
        self.compressor = Compressor(config, role.compress_ratio) if role.owns_rows else None
        self.indexer = Indexer(config, role.owns_rows) if role.selects else None

    def forward(
        self, hidden: Tensor, cos_sin: Tensor, pages: SharedKvPages, batch: SharedKvBatch, selection: Selection
    ) -> Tensor:
        """Attention of new tokens, whose rows go to the cache.

        hidden      [T, hidden_size], normalized; the tokens of `batch`, in its order
        cos_sin     [P, rope_dim] of this layer: base 10000 where it has a window only, else 160000 with YaRN
        pages       of this layer; batch of this forward, from SharedKvCache.batch
        selection   of this forward, read and replaced by the layers in turn
        Returns [T, hidden_size].
        """
        config, rotate = self.config, Rotary(cos_sin)
        q_latent = self.q_norm(self.wq_a(hidden))
        q = rotate(self.wq_b(q_latent).unflatten(-1, (config.num_heads, config.head_dim)), batch.positions)
        kv = rotate(self.kv_norm(self.wkv(hidden)), batch.positions)
        if self.compressor is not None:
            latents, positions, slots = self.compressor(hidden, pages, batch)
            assert self.indexer is not None
            # from the latent as it is: neither rotated nor quantized
            pages.write_index_keys(rotate(self.indexer.keys(latents), positions), slots)
            pages.write_compressed(rotate(latents, positions), slots)
        if self.indexer is not None:
            index_q = rotate(self.indexer.queries(q_latent), batch.positions)
            weights = self.indexer.weights(hidden)
            if self.role.makes_candidates:
                selection.candidates = ops.candidate_blocks(
                    index_query(index_q, pages), weights, num_candidates=self.candidate_topk_blocks,
                    candidate_block_size=self.candidate_block_size, **pages.index_arguments, **batch.index_arguments,
                )  # fmt: skip
            limit = selection.candidates if self.role.limited else None
            selection.topk_indices = select(
                index_q, weights, config.index_topk, pages, batch, limit, self.candidate_block_size
            )
        out = attend(q, kv, self.attn_sink, cos_sin, selection.topk_indices, config.softmax_scale, pages, batch)
        result: Tensor = self.wo_b(self.wo_a(out))
        return result


class Compressor(nn.Module):
    """Projects tokens to latents, and pools each group of more than one."""

    def __init__(self, config: SharedKvConfig, compress_ratio: int) -> None:
        super().__init__()
        self.wkv = linear(config.hidden_size, config.head_dim)
        self.wgate = linear(config.hidden_size, config.head_dim) if compress_ratio > 1 else None
        self.norm = RmsNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, pages: SharedKvPages, batch: SharedKvBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [R, head_dim] of the groups that close, not rotated; their positions and slots [R]."""
        x, gate = hidden, None
        if self.wgate is not None:  # pooled in float32, projections included
            x = hidden.to(accurate(hidden))
            gate = nn.functional.linear(x, self.wgate.weight.to(x.dtype))
        kv = nn.functional.linear(x, self.wkv.weight.to(x.dtype))
        latents, positions, slots = compress(kv, self.norm, pages, batch, pages.state, gate=gate)
        return latents.to(hidden.dtype), positions, slots


class Indexer(nn.Module):
    """Index queries and head weights, and in a source of rows index keys too."""

    def __init__(self, config: SharedKvConfig, owns_keys: bool) -> None:
        super().__init__()
        self.config = config
        self.wq_b = linear(config.q_lora_rank, config.index_heads * config.index_dim)
        self.weights_proj = linear(config.hidden_size, config.index_heads)
        self.wk = linear(config.head_dim, config.index_dim) if owns_keys else None
        self.k_norm = RmsNorm(config.index_dim, config.rms_norm_eps) if owns_keys else None

    def keys(self, latents: Tensor) -> Tensor:
        """[R, index_dim], not rotated."""
        assert self.wk is not None
        assert self.k_norm is not None
        keys: Tensor = self.k_norm(self.wk(latents))
        return keys

    def queries(self, q_latent: Tensor) -> Tensor:
        """[T, index_heads, index_dim], not rotated."""
        queries: Tensor = self.wq_b(q_latent)
        return queries.unflatten(-1, (self.config.index_heads, self.config.index_dim))

    def weights(self, hidden: Tensor) -> Tensor:
        """[T, index_heads], with the factors of the scores in them."""
        weights: Tensor = self.weights_proj(hidden)
        return weights.to(accurate(weights)) * (self.config.index_heads**-0.5 * self.config.index_dim**-0.5)
