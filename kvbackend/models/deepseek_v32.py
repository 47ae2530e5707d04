"""The attention layer of DeepSeek-V3.2 and GLM-5: absorbed MLA over the tokens that an indexer selects (DSA).

Parameters have the names of transformers' `deepseek_v32` and `glm_moe_dsa`, whose state dict of a layer loads as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import ops
from ..cache.dsa import DsaLayer, DsaPages
from ..cache.shared_kv import as_stored
from ..errors import ArgumentError
from ..typed import checked
from ._parts import RmsNorm, accurate, linear, need_config


@dataclass(frozen=True)
class DsaConfig:
    """Sizes of the attention of DeepSeek-V3.2; the defaults are its own.

    softmax_scale       see `kvbackend.rope.softmax_scale`: 192 ** -0.5 times YaRN's temperature
    index_interleaved   whether the indexer rotates interleaved pairs (GLM-5) or half-split ones (DeepSeek-V3.2)
    """

    softmax_scale: float
    hidden_size: int = 7168
    num_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 2048
    index_interleaved: bool = False
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        need_config(self)

    @checked
    def layer(self, selects: bool = True, index_format: str = "auto", latent_format: str = "auto") -> DsaLayer:
        """What PagedCache is told of a layer."""
        index_dim = self.index_dim if selects else 0
        return DsaLayer(self.kv_lora_rank, self.qk_rope_head_dim, index_dim, index_format, latent_format)


class DeepseekV32Attention(nn.Module):
    """One attention layer over a PagedCache of DsaLayers, for prefill, chunks of it, decode, and mixed batches.

        cache = PagedCache([config.layer()] * num_layers, num_blocks, 64, dtype)
        slots = cache.append_batch(seqs, new); batch = cache.batch(seqs, new)
        out, selected = module(hidden, positions, cos_sin, cache.layers[i], slots, batch)

    config    sizes
    selects   whether it has an indexer; GLM-5's `shared` layers have none and take the selection of the one before

    The released kernels rotate index queries and keys by a Hadamard matrix before FP8: left out here, as in vLLM.
    Source: DeepSeek-V3.2-Exp, section 2.1; transformers 5.24 deepseek_v32, glm_moe_dsa.
    """

    @checked
    def __init__(self, config: DsaConfig, selects: bool = True) -> None:
        super().__init__()
        self.config = config
        qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = linear(config.q_lora_rank, config.num_heads * qk_head_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = linear(config.kv_lora_rank, config.num_heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(config.num_heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config) if selects else None

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        pages: DsaPages,
        slots: Tensor,
        batch: dict[str, Any],
        topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of new tokens, whose rows go to the cache.

        hidden         [T, hidden_size], normalized; positions [T] of these tokens
        cos_sin        [P, qk_rope_head_dim]
        pages          of this layer; slots [T] from PagedCache.append_batch; batch from PagedCache.batch
        topk_indices   [T, index_topk] of the layer before, where this one does not select
        Returns [T, hidden_size] and the selection.
        """
        config = self.config
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden))
        q = self.q_b_proj(q_latent).unflatten(-1, (config.num_heads, -1))
        q_nope, q_pe = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        q_pe = ops.apply_rope(q_pe, positions, cos_sin, interleaved=True)
        ckv, kpe = ops.mla_project_kv(
            hidden, self.kv_a_proj_with_mqa.weight, self.kv_a_layernorm.weight, cos_sin, positions, config.rms_norm_eps
        )
        pages.write(slots, ckv, kpe)
        if self.indexer is not None:
            topk_indices = self.indexer(hidden, q_latent, positions, cos_sin, pages, slots, batch)
        if topk_indices is None:
            raise ArgumentError(
                "topk_indices is None; a layer that selects nothing attends to the tokens of the one before: pass them"
            )
        weight = self.kv_b_proj.weight.unflatten(0, (config.num_heads, -1))  # [H, nope + v, kv_lora_rank]
        w_uk, w_uv = weight.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        latent, _ = ops.sparse_mla_attention(
            ops.absorb_q(q_nope, w_uk), q_pe, **pages.attention_arguments, **batch, topk_indices=topk_indices,
            softmax_scale=config.softmax_scale,
        )  # fmt: skip
        return self.o_proj(ops.project_out(latent, w_uv).flatten(1)), topk_indices


class Indexer(nn.Module):
    """Scores index keys, one for each token, and selects the tokens that a query attends to."""

    def __init__(self, config: DsaConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = linear(config.q_lora_rank, config.index_heads * config.index_dim)
        self.wk = linear(config.hidden_size, config.index_dim)
        self.k_norm = nn.LayerNorm(config.index_dim, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, config.index_heads)

    def forward(
        self,
        hidden: Tensor,
        q_latent: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        pages: DsaPages,
        slots: Tensor,
        batch: dict[str, Any],
    ) -> Tensor:
        """Positions [T, index_topk] int32, ascending, -1 in the tail."""
        config = self.config

        def rotate(x: Tensor) -> Tensor:  # the first dims of [T, H, index_dim]
            turned: Tensor = ops.apply_rope(x, positions, cos_sin, config.index_interleaved)
            return turned

        keys = rotate(self.k_norm(self.wk(hidden))[:, None])[:, 0]
        pages.write_index_keys(slots, keys)
        q = rotate(self.wq_b(q_latent).unflatten(-1, (config.index_heads, config.index_dim)))
        q = as_stored(q.flatten(0, 1), pages.index_format).view(q.shape)
        weights: Tensor = self.weights_proj(hidden)
        weights = weights.to(accurate(weights)) * (config.index_heads**-0.5 * config.index_dim**-0.5)
        selected: Tensor = ops.lightning_indexer(q, weights, k=config.index_topk, **pages.index_arguments, **batch)
        return selected
