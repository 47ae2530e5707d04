"""Rotary position embeddings: frequencies, YaRN, and the table that `ops.apply_rope` takes.

Angles are computed in float64: near position 1 000 000 a float32 angle is off by up to 0.04 radians.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError


@dataclass(frozen=True)
class Yarn:
    """YaRN's context extension (arXiv 2309.00071), with the names of model configs.

    factor                             how much longer than in pretraining a context may be
    original_max_position_embeddings   tokens of the pretraining context
    beta_fast, beta_slow               turns within that context above which a frequency stays, below which it is
                                       divided by `factor`
    mscale, mscale_all_dim             attention temperature; their quotient scales cos and sin, the second alone
                                       scales the logits. With neither given cos and sin carry all of it.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def correction_range(self, rotary_dim: int, base: float) -> tuple[int, int]:
        """The frequency indices between which the ramp from kept to divided runs."""

        def index(turns: float) -> float:
            wavelength = self.original_max_position_embeddings / (2 * math.pi * turns)
            return rotary_dim * math.log(wavelength) / (2 * math.log(base))

        low = max(math.floor(index(self.beta_fast)), 0)
        return low, min(math.ceil(index(self.beta_slow)), rotary_dim - 1)

    @property
    def table_scale(self) -> float:
        """What cos and sin are multiplied by."""
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)

    @property
    def softmax_scale_factor(self) -> float:
        """What the softmax scale is multiplied by."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1; 1 where the context is not extended."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(qk_head_dim: int, yarn: Yarn | None = None) -> float:
    """The multiplier of the logits: qk_head_dim**-0.5, and YaRN's temperature.

    qk_head_dim counts all dims of a head that take part in q.k before any absorption: 128 + 64 for DeepSeek-V3.
    """
    return qk_head_dim**-0.5 * (yarn.softmax_scale_factor if yarn else 1.0)


def inv_freq(rotary_dim: int, base: float, yarn: Yarn | None = None) -> Tensor:
    """The angle per position of each rotated pair: [rotary_dim / 2] float64, on the host.

    rotary_dim   even number of dims that are rotated
    base         `rope_theta` of model configs
    Source: RoFormer (arXiv 2104.09864) section 3.2; YaRN (arXiv 2309.00071) section 3.2, with the rounded range of
    its authors' code.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ArgumentError(f"rotary_dim is {rotary_dim}; pairs are rotated, so it must be even and positive: check it")
    index = torch.arange(rotary_dim // 2, dtype=torch.float64)
    frequencies = base ** (-2.0 * index / rotary_dim)
    if yarn is None or yarn.factor == 1:
        return frequencies
    low, high = yarn.correction_range(rotary_dim, base)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def cos_sin_table(
    num_positions: int,
    rotary_dim: int,
    base: float,
    yarn: Yarn | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """cos then sin of positions 0 .. num_positions-1: [num_positions, rotary_dim], as `apply_rope` takes it.

    The first rotary_dim / 2 columns are cosines, the others sines, both times YaRN's `table_scale`. Computed in
    float64 on the host, since not every device has float64.
    """
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = positions[:, None] * inv_freq(rotary_dim, base, yarn)  # [num_positions, rotary_dim / 2]
    table = torch.cat((angles.cos(), angles.sin()), -1) * (yarn.table_scale if yarn else 1.0)
    return table.to(dtype).to(device)
