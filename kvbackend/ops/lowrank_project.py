"""Bring keys, values or queries to a low rank, head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, need
from ..spec import op
from . import _checks
from ._math import compute_dtype
from ._samples import Maker


@op(group="low rank")
def lowrank_project(
    x: Float[Tensor, "T Hk D"],
    projection: Float[Tensor, "Hk D r"],
) -> Tensor:
    """Multiply each head's rows by that head's projection: what a low-rank cache stores in place of the rows.

    x            [T, Hk, D], keys before RoPE, values, or queries (one projection for each query head); any strides
    projection   [Hk, D, r], x's dtype, r at most D: `down` of a kvbackend.compress.Projection; any strides
    Returns z [T, Hk, r] in x's dtype; sums are float32, rounded once.

    With the transposed basis of lowrank_reconstruct as projection it takes queries into the latent space:
    q . (z basis) = (q basis^T) . z, with the softmax scale of D dims. Heads are independent; no tokens give no rows.
    Source: Palu (arXiv 2407.21118); Eckart and Young, Psychometrika 1 (1936), for the best projection.
    """
    dtype = compute_dtype(x)
    return torch.einsum("thd,hdr->thr", x.to(dtype), projection.to(dtype)).to(x.dtype).contiguous()


@lowrank_project.check
def _(x, projection, **_):
    _checks.same_dtype("x", x, projection=projection)
    rank, head_dim = projection.shape[2], x.shape[2]
    need(
        rank <= head_dim,
        f"projection has rank {rank} for heads of {head_dim} dims; it must be at most {head_dim}: choose a lower rank, "
        f"or transpose it if it is a basis",
    )


@lowrank_project.fake
def _(x, projection, **_):
    return x.new_empty(x.shape[0], x.shape[1], projection.shape[2])


@lowrank_project.samples
def _(device, dtype):
    make = Maker(device, dtype)

    def call(tokens: int, heads: int = 3, dim: int = 24, rank: int = 10, **other: Any) -> dict[str, Any]:
        x, projection = make.randn(tokens, heads, dim), make.randn(heads, dim, rank, scale=dim**-0.5)
        return {"x": x, "projection": projection, **other}

    yield "decode", call(1)
    yield "many tokens", call(70)
    yield "one head, odd dims", call(4, heads=1, dim=13, rank=7)
    yield "rank 1", call(4, rank=1)
    yield "full rank", call(4, rank=24)
    yield "empty", call(0)
    yield "no heads", call(3, heads=0)
    yield "sliced rows", call(5, x=make.randn(5, 3, 32)[..., :24])
    yield "heads before tokens", call(5, x=make.randn(3, 5, 24).transpose(0, 1))
    yield "expanded rows", call(5, x=make.randn(1, 3, 24).expand(5, -1, -1))
    yield "last dim strided", call(5, x=make.randn(5, 24, 3).transpose(1, 2))
    yield "truncated projection", call(5, projection=make.randn(3, 24, 24, scale=0.2)[..., :10])
    yield "transposed basis", call(5, projection=make.randn(3, 10, 24, scale=0.2).transpose(1, 2))
    yield "one projection for all heads", call(5, projection=make.randn(1, 24, 10, scale=0.2).expand(3, -1, -1))
    yield "production", call(16, heads=8, dim=128, rank=32)
