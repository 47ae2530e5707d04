"""What the attention layers share: their sizes, norms, the grouped projection, and a compressor."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import SharedKvBatch, SharedKvPages
from ..errors import ArgumentError
from ..typed import check_fields, need_sizes


@dataclass(frozen=True)
class SharedKvConfig:
    """Sizes of the attention of DeepSeek-V4 and V4.1; the defaults are those of V4-Flash.

    hidden_size, num_heads, q_lora_rank   of the model
    head_dim, rope_dim                    width of a row, and of its last dims that RoPE rotates
    o_groups, o_lora_rank                 groups of heads that the output projection takes apart, and the width of each
    index_heads, index_dim, index_topk    of the indexer
    rms_norm_eps                          1e-6 in V4, 1e-20 in V4.1
    """

    hidden_size: int = 4096
    num_heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 512
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        need_config(self)
        if self.num_heads % self.o_groups:
            raise ArgumentError(
                f"o_groups of SharedKvConfig is {self.o_groups} for {self.num_heads} heads; each group takes as many: "
                f"pass a divisor of num_heads"
            )

    @property
    def softmax_scale(self) -> float:
        """No YaRN temperature in these models."""
        return self.head_dim**-0.5


def need_config(config: Any) -> None:
    """Raise ArgumentError unless the fields of a layer's config are sizes, and numbers that multiply and divide."""
    check_fields(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type == "int":
            need_sizes(config, **{field.name: value})
            object.__setattr__(config, field.name, index(value))
        elif field.type == "float" and not 0 < value < math.inf:
            raise ArgumentError(
                f"{field.name} of {type(config).__name__} is {value}; it must be above 0 and finite: pass the model's"
            )


class RmsNorm(nn.Module):
    """Root-mean-square norm in float32, or float64 where the input is."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (normalized(x, self.eps) * self.weight).to(x.dtype)


def normalized(x: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, not rounded back to x's dtype."""
    x = x.to(accurate(x))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def accurate(x: Tensor) -> torch.dtype:
    """float32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


def linear(in_features: int, out_features: int) -> nn.Linear:
    """None of these projections has a bias."""
    return nn.Linear(in_features, out_features, bias=False)


class GroupedLinear(nn.Linear):
    """A projection of each group of heads by itself: [T, H, D] to [T, groups * rank]."""

    def __init__(self, groups: int, group_width: int, rank: int) -> None:
        super().__init__(group_width, groups * rank, bias=False)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(0, (self.groups, -1))  # [groups, rank, group_width]
        return torch.einsum("tgi,gri->tgr", x.reshape(len(x), self.groups, weight.shape[-1]), weight).flatten(1)


class Rotary:
    """RoPE of the last dims of a forward's rows, interleaved pairs, at the positions of its tokens or of groups."""

    def __init__(self, cos_sin: Tensor) -> None:
        self.cos_sin = cos_sin

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, H, D] or [T, D]."""
        heads = x if x.dim() == 3 else x[:, None]
        turned: Tensor = ops.apply_rope(heads, positions, self.cos_sin, interleaved=True, trailing=True)
        return turned if x.dim() == 3 else turned[:, 0]


def compress(
    kv: Tensor,
    norm: RmsNorm,
    pages: SharedKvPages,
    batch: SharedKvBatch,
    state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """ops.compress_kv of one layer: rows, the position of each, and its slot."""
    kept = {} if state is None else dict(state=state, state_slots=batch.state_slots)
    rows, positions, slots = ops.compress_kv(
        kv, norm.weight, eps=norm.eps, **kept, **options, **pages.compress_arguments, **batch.compress_arguments
    )
    return rows, positions, slots


def attend(
    q: Tensor,
    kv: Tensor,
    sinks: Tensor,
    cos_sin: Tensor,
    topk_indices: Tensor | None,
    softmax_scale: float,
    pages: SharedKvPages,
    batch: SharedKvBatch,
) -> Tensor:
    """Attend to the window and the compressed rows, rotate back, and only then write the window's new rows."""
    entries = {} if pages.compressed is None else dict(block_table=batch.block_table, topk_indices=topk_indices)
    out, _ = ops.shared_kv_attention(
        q, kv=pages.as_stored(kv), sinks=sinks, cos_sin=cos_sin, softmax_scale=softmax_scale, **entries,
        **pages.attention_arguments, **batch.attention_arguments,
    )  # fmt: skip
    pages.write_window(kv, batch.window_slots)
    result: Tensor = out
    return result
