"""Move the key up-projection of MLA into the query."""

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
def absorb_q(
    q_nope: Float[Tensor, "T H qk_nope_head_dim"],
    w_uk: Float[Tensor, "H qk_nope_head_dim kv_lora_rank"],
) -> Tensor:
    """Multiply each query head by its W_UK, so that it meets the cached latent instead of an up-projected key.

    q_nope   [T, H, qk_nope_head_dim], the query dims without RoPE; any strides
    w_uk     [H, qk_nope_head_dim, kv_lora_rank], q_nope's dtype: the first qk_nope_head_dim rows of each head in the
             model's kv_b_proj.weight viewed as [H, qk_nope_head_dim + v_head_dim, kv_lora_rank]; any strides
    Returns [T, H, kv_lora_rank] in q_nope's dtype; sums are float32.

    q.(W_UK c) = (q W_UK).c, so the softmax scale stays that of qk_nope_head_dim + qk_rope_head_dim dims.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and appendix C.
    """
    dtype = compute_dtype(q_nope)
    return torch.einsum("thd,hdc->thc", q_nope.to(dtype), w_uk.to(dtype)).to(q_nope.dtype).contiguous()


@absorb_q.check
def _(q_nope, w_uk, **_):
    _checks.same_dtype("q_nope", q_nope, w_uk=w_uk)


@absorb_q.fake
def _(q_nope, w_uk, **_):
    return q_nope.new_empty(q_nope.shape[0], q_nope.shape[1], w_uk.shape[2])


@absorb_q.samples
def _(device, dtype):
    make = Maker(device, dtype)

    def call(tokens: int, heads: int = 3, dim: int = 10, rank: int = 24, **other: Any) -> dict[str, Any]:
        q_nope, w_uk = make.randn(tokens, heads, dim), make.randn(heads, dim, rank, scale=dim**-0.5)
        return {"q_nope": q_nope, "w_uk": w_uk, **other}

    yield "decode", call(1)
    yield "many tokens", call(70)
    yield "one head, odd dims", call(4, heads=1, dim=7, rank=13)
    yield "empty", call(0)
    yield "no heads", call(3, heads=0)
    yield "sliced queries", call(5, q_nope=make.randn(5, 3, 18)[..., :10])
    yield "heads before tokens", call(5, q_nope=make.randn(3, 5, 10).transpose(0, 1))
    yield "expanded queries", call(5, q_nope=make.randn(1, 3, 10).expand(5, -1, -1))
    yield "weight of kv_b_proj", call(5, w_uk=make.randn(3, 26, 24, scale=0.3)[:, :10])
    yield "transposed weight", call(5, w_uk=make.randn(3, 24, 10, scale=0.3).transpose(1, 2))
    yield "one weight for all heads", call(5, w_uk=make.randn(1, 10, 24, scale=0.3).expand(3, -1, -1))
    yield "production", call(4, heads=16, dim=128, rank=512)
