"""The attention layer of DeepSeek-V4: a window, and compressed rows that an indexer selects from (CSA) or all (HCA).

Parameters have the names of transformers' `deepseek_v4`, whose state dict of a layer loads as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import SharedKvBatch, SharedKvLayer, SharedKvPages
from ..cache.shared_kv import as_stored
from ..typed import checked
from ._parts import GroupedLinear, RmsNorm, Rotary, SharedKvConfig, accurate, attend, compress, linear, normalized


class DeepseekV4Attention(nn.Module):
    """One attention layer over a SharedKvCache, for prefill, chunks of it, decode, and batches of all of these.

        layers = deepseek_v4_layers(compress_ratios)
        modules = [DeepseekV4Attention(config, layer) for layer in layers]
        cache = SharedKvCache(layers, num_blocks, 256, num_sequences, dtype)
        cache.append_batch(seqs, new); batch = cache.batch(seqs, new)
        for module, pages in zip(modules, cache.layers): hidden = ... module(hidden, cos_sin, pages, batch) ...

    config   sizes
    layer    what it keeps, from deepseek_v4_layers

    Published checkpoints were trained with a Hadamard rotation of index queries and keys before FP4, which this layer
    leaves out, as vLLM and transformers do: scores are the same but for quantization, cached index keys are not.
    Source: DeepSeek-V4 inference code; transformers 5.24 deepseek_v4.
    """

    @checked
    def __init__(self, config: SharedKvConfig, layer: SharedKvLayer) -> None:
        super().__init__()
        self.config = config
        heads, dim, eps = config.num_heads, config.head_dim, config.rms_norm_eps
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_norm = RmsNorm(config.q_lora_rank, eps)
        self.q_b_proj = linear(config.q_lora_rank, heads * dim)
        self.kv_proj = linear(config.hidden_size, dim)
        self.kv_norm = RmsNorm(dim, eps)
        self.o_a_proj = GroupedLinear(config.o_groups, heads * dim // config.o_groups, config.o_lora_rank)
        self.o_b_proj = linear(config.o_groups * config.o_lora_rank, config.hidden_size)
        self.sinks = nn.Parameter(torch.zeros(heads))
        self.compressor = Compressor(config, layer, dim) if layer.compress_ratio else None
        if self.compressor is not None and layer.index_dim:
            self.compressor.indexer = Indexer(config, layer)

    def forward(self, hidden: Tensor, cos_sin: Tensor, pages: SharedKvPages, batch: SharedKvBatch) -> Tensor:
        """Attention of new tokens, whose rows go to the cache.

        hidden    [T, hidden_size], normalized; the tokens of `batch`, in its order
        cos_sin   [P, rope_dim] of this layer: base 10000 where it has a window only, else 160000 with YaRN
        pages     of this layer; batch of this forward, from SharedKvCache.batch
        Returns [T, hidden_size].
        """
        config, rotate = self.config, Rotary(cos_sin)
        q_latent = self.q_a_norm(self.q_a_proj(hidden))
        q = self.q_b_proj(q_latent).unflatten(-1, (config.num_heads, config.head_dim))
        q = rotate(normalized(q, config.rms_norm_eps).to(q.dtype), batch.positions)
        kv = rotate(self.kv_norm(self.kv_proj(hidden)), batch.positions)
        selected = None
        if self.compressor is not None:
            rows, slots = self.compressor(hidden, cos_sin, pages, batch, pages.state)
            pages.write_compressed(rows, slots)
            if self.compressor.indexer is not None:
                selected = self.compressor.indexer(hidden, q_latent, cos_sin, pages, batch)
        out = attend(q, kv, self.sinks, cos_sin, selected, config.softmax_scale, pages, batch)
        result: Tensor = self.o_b_proj(self.o_a_proj(out))
        return result


class Compressor(nn.Module):
    """Projects tokens to rows and gates, and pools each group; computes in the dtype of its projections."""

    def __init__(self, config: SharedKvConfig, layer: SharedKvLayer, dim: int) -> None:
        super().__init__()
        width = dim * (2 if layer.overlap else 1)
        self.kv_proj = linear(config.hidden_size, width)
        self.gate_proj = linear(config.hidden_size, width)
        self.position_bias = nn.Parameter(torch.zeros(layer.compress_ratio, width))
        self.kv_norm = RmsNorm(dim, config.rms_norm_eps)
        self.indexer: Indexer | None = None

    def forward(
        self, hidden: Tensor, cos_sin: Tensor, pages: SharedKvPages, batch: SharedKvBatch, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows [R, dim] of the groups that close, and their slots [R]."""
        x = hidden.to(self.kv_proj.weight.dtype)
        rows, _, slots = compress(
            self.kv_proj(x), self.kv_norm, pages, batch, state, gate=self.gate_proj(x),
            position_bias=self.position_bias, cos_sin=cos_sin,
        )  # fmt: skip
        return rows.to(hidden.dtype), slots


class Indexer(Compressor):
    """Scores compressed index keys of its own, and selects the entries that a query attends to."""

    def __init__(self, config: SharedKvConfig, layer: SharedKvLayer) -> None:
        super().__init__(config, layer, config.index_dim)
        self.config = config
        self.q_b_proj = linear(config.q_lora_rank, config.index_heads * config.index_dim)
        self.scorer = Scorer(config)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, q_latent: Tensor, cos_sin: Tensor, pages: SharedKvPages, batch: SharedKvBatch
    ) -> Tensor:
        """Entries [T, index_topk] int32, ascending, -1 in the tail."""
        keys, slots = super().forward(hidden, cos_sin, pages, batch, pages.index_state)
        pages.write_index_keys(keys, slots)
        q = self.q_b_proj(q_latent).unflatten(-1, (self.config.index_heads, self.config.index_dim))
        q = Rotary(cos_sin)(q, batch.positions)
        return select(q, self.scorer(hidden), self.config.index_topk, pages, batch)


class Scorer(nn.Module):
    """The weights of the index heads."""

    def __init__(self, config: SharedKvConfig) -> None:
        super().__init__()
        self.weights_proj = linear(config.hidden_size, config.index_heads)
        self.scale = config.index_heads**-0.5 * config.index_dim**-0.5

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, index_heads], with the factors of the scores in them."""
        weights: Tensor = self.weights_proj(hidden)
        return weights.to(accurate(weights)) * self.scale


def select(
    q: Tensor,
    weights: Tensor,
    topk: int,
    pages: SharedKvPages,
    batch: SharedKvBatch,
    candidates: Tensor | None = None,
    candidate_block_size: int = 8,
) -> Tensor:
    """The best entries of each index query [T, Hi, Di], which is quantized as the keys are."""
    selected: Tensor = ops.lightning_indexer(
        index_query(q, pages), weights, k=topk, candidates=candidates, candidate_block_size=candidate_block_size,
        **pages.index_arguments, **batch.index_arguments,
    )  # fmt: skip
    return selected


def index_query(q: Tensor, pages: SharedKvPages) -> Tensor:
    """Queries [T, Hi, Di] on the grid of the index keys."""
    return as_stored(q.flatten(0, 1), pages.sizes.index_format).view(q.shape)
