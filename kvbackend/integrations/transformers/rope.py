"""The table that a transformers model turns keys by, for caches that keep keys before RoPE."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...errors import ArgumentError

PROBE_POSITIONS = (0, 1, 5)
TOLERANCE = 1e-4


def rope_table(model: Any) -> Tensor:
    """[P, rotary_dim] float32, cosines then sines, of every position of the model's context, as the model has them.

    Raises ArgumentError for a model whose RoPE is not one fixed rotation of halves: by sequence length, by layer, with
    a temperature in the table, or of neighbouring pairs.
    """
    rotary = [module for module in model.modules() if hasattr(module, "inv_freq") and hasattr(module, "rope_type")]
    attentions = [module for module in model.modules() if hasattr(module, "k_proj") and hasattr(module, "q_proj")]
    function: Any = None
    if attentions:
        function = getattr(sys.modules[type(attentions[0]).__module__], "apply_rotary_pos_emb", None)
    if len(rotary) != 1 or function is None:
        _refuse(model, f"{len(rotary)} rotary embeddings and {'no' if function is None else 'an'} apply_rotary_pos_emb")
    if "dynamic" in rotary[0].rope_type or rotary[0].rope_type == "longrope":
        _refuse(model, f"rope_type {rotary[0].rope_type!r}, whose angles change with the length")
    if getattr(rotary[0], "attention_scaling", 1.0) != 1.0:
        _refuse(model, f"a table scaled by {rotary[0].attention_scaling}")
    cos, sin = _angles(rotary[0], torch.arange(model.config.max_position_embeddings))
    half = cos.shape[-1] // 2
    table = torch.cat((cos[:, :half], sin[:, :half]), -1).contiguous()
    positions = torch.tensor(PROBE_POSITIONS)
    x = torch.randn(len(positions), 1, attentions[0].head_dim, generator=torch.Generator().manual_seed(0))
    x = x.to(table.device)
    angles = cos[positions][None], sin[positions][None]
    theirs = function(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *angles)[1][0].transpose(0, 1)
    ours = ops.apply_rope(x, positions.to(table.device), table)
    if not torch.allclose(theirs, ours, atol=TOLERANCE):
        _refuse(model, "an apply_rotary_pos_emb that turns other pairs than (i, i + half)")
    return table


def _angles(rotary: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [P, rotary_dim], float32."""
    device = rotary.inv_freq.device
    x = torch.zeros(1, device=device, dtype=torch.float32)  # it only tells dtype and device
    with torch.no_grad():
        cos, sin = rotary(x, positions[None].to(device))
    return cos[0].float(), sin[0].float()


def _refuse(model: Any, found: str) -> None:
    raise ArgumentError(
        f"{type(model).__name__} has {found}; keys that are kept before RoPE are turned by one table of halves: leave "
        f"out low_rank, and pass positions='original' to StreamingLLM"
    )
