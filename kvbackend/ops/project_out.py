"""Turn MLA's latent result into values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float
from ..spec import op
from . import _checks
from ._math import compute_dtype
from ._samples import Maker


@op(group="low rank")
def project_out(
    latent: Float[Tensor, "T H kv_lora_rank"],
    w_uv: Float[Tensor, "H v_head_dim kv_lora_rank"],
) -> Tensor:
    """Multiply each head's latent attention result by its W_UV, which gives that head's values.

    latent   [T, H, kv_lora_rank], out of mla_attention or sparse MLA; any strides
    w_uv     [H, v_head_dim, kv_lora_rank], latent's dtype: the last v_head_dim rows of each head in the model's
             kv_b_proj.weight viewed as [H, qk_nope_head_dim + v_head_dim, kv_lora_rank]; any strides
    Returns [T, H, v_head_dim] in latent's dtype; sums are float32.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and appendix C.
    """
    dtype = compute_dtype(latent)
    return torch.einsum("thc,hvc->thv", latent.to(dtype), w_uv.to(dtype)).to(latent.dtype).contiguous()


@project_out.check
def _(latent, w_uv, **_):
    _checks.same_dtype("latent", latent, w_uv=w_uv)


@project_out.fake
def _(latent, w_uv, **_):
    return latent.new_empty(latent.shape[0], latent.shape[1], w_uv.shape[1])


@project_out.samples
def _(device, dtype):
    make = Maker(device, dtype)

    def call(tokens: int, heads: int = 3, dim: int = 10, rank: int = 24, **other: Any) -> dict[str, Any]:
        latent, w_uv = make.randn(tokens, heads, rank), make.randn(heads, dim, rank, scale=rank**-0.5)
        return {"latent": latent, "w_uv": w_uv, **other}

    yield "decode", call(1)
    yield "many tokens", call(70)
    yield "one head, odd dims", call(4, heads=1, dim=7, rank=13)
    yield "empty", call(0)
    yield "no heads", call(3, heads=0)
    yield "sliced latents", call(5, latent=make.randn(5, 3, 32)[..., :24])
    yield "heads before tokens", call(5, latent=make.randn(3, 5, 24).transpose(0, 1))
    yield "expanded latents", call(5, latent=make.randn(1, 3, 24).expand(5, -1, -1))
    yield "weight of kv_b_proj", call(5, w_uv=make.randn(3, 26, 24, scale=0.2)[:, -10:])
    yield "transposed weight", call(5, w_uv=make.randn(3, 24, 10, scale=0.2).transpose(1, 2))
    yield "one weight for all heads", call(5, w_uv=make.randn(1, 10, 24, scale=0.2).expand(3, -1, -1))
    yield "production", call(4, heads=16, dim=128, rank=512)
