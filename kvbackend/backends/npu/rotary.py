"""RoPE by torch_npu.npu_rotary_mul, for the ops that rotate."""

from __future__ import annotations

import torch
from torch import Tensor


def turn(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool = False) -> Tensor:
    """x [T, H, rotary_dim] turned by the angles of its positions [T], in float32; position -1 leaves it as it is."""
    import torch_npu

    if x.numel() == 0:
        return x
    half = cos_sin.shape[1] // 2
    angles = cos_sin.index_select(0, positions.clamp(min=0)).float()  # [T, rotary_dim]
    is_token = (positions >= 0)[:, None]
    cos = torch.where(is_token, angles[:, :half], 1.0)
    sin = torch.where(is_token, -angles[:, half:] if inverse else angles[:, half:], 0.0)
    if interleaved:  # each dim of a pair has the pair's angle
        cos, sin = (torch.stack((part, part), -1).flatten(-2) for part in (cos, sin))
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    mode = "interleave" if interleaved else "half"
    turned = torch_npu.npu_rotary_mul(x[None].float().contiguous(), cos[None, :, None], sin[None, :, None], mode)
    return turned[0].to(x.dtype)  # BSND: a batch of one
