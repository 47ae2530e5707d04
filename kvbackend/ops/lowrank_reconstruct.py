"""Bring low-rank keys or values back to the dims of a head."""

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
def lowrank_reconstruct(
    z: Float[Tensor, "T Hk r"],
    basis: Float[Tensor, "Hk r D"],
) -> Tensor:
    """Multiply each head's low-rank rows by that head's basis: the keys or values that attention reads.

    z       [T, Hk, r], out of lowrank_project, or an attention result over such values; any strides
    basis   [Hk, r, D], z's dtype, r at most D: `up` of a kvbackend.compress.Projection; any strides
    Returns [T, Hk, D] in z's dtype; sums are float32, rounded once.

    Keys that were projected before RoPE are turned after this step, at their own positions (apply_rope). For values the
    basis can be absorbed into the output projection instead. Rank 0 gives zeros; no tokens give no rows.
    Source: Palu (arXiv 2407.21118).
    """
    dtype = compute_dtype(z)
    return torch.einsum("thr,hrd->thd", z.to(dtype), basis.to(dtype)).to(z.dtype).contiguous()


@lowrank_reconstruct.check
def _(z, basis, **_):
    _checks.same_dtype("z", z, basis=basis)
    rank, head_dim = basis.shape[1], basis.shape[2]
    need(
        rank <= head_dim,
        f"basis has rank {rank} for heads of {head_dim} dims; it must be at most {head_dim}: choose a lower rank, or "
        f"transpose it if it is a projection",
    )


@lowrank_reconstruct.fake
def _(z, basis, **_):
    return z.new_empty(z.shape[0], z.shape[1], basis.shape[2])


@lowrank_reconstruct.samples
def _(device, dtype):
    make = Maker(device, dtype)

    def call(tokens: int, heads: int = 3, dim: int = 24, rank: int = 10, **other: Any) -> dict[str, Any]:
        z, basis = make.randn(tokens, heads, rank), make.randn(heads, rank, dim, scale=max(rank, 1) ** -0.5)
        return {"z": z, "basis": basis, **other}

    yield "decode", call(1)
    yield "many tokens", call(70)
    yield "one head, odd dims", call(4, heads=1, dim=13, rank=7)
    yield "rank 1", call(4, rank=1)
    yield "rank 0", call(4, rank=0)
    yield "full rank", call(4, rank=24)
    yield "empty", call(0)
    yield "no heads", call(3, heads=0)
    yield "sliced rows", call(5, z=make.randn(5, 3, 32)[..., :10])
    yield "heads before tokens", call(5, z=make.randn(3, 5, 10).transpose(0, 1))
    yield "expanded rows", call(5, z=make.randn(1, 3, 10).expand(5, -1, -1))
    yield "last dim strided", call(5, z=make.randn(5, 10, 3).transpose(1, 2))
    yield "truncated basis", call(5, basis=make.randn(3, 24, 24, scale=0.2)[:, :10])
    yield "transposed projection", call(5, basis=make.randn(3, 24, 10, scale=0.2).transpose(1, 2))
    yield "one basis for all heads", call(5, basis=make.randn(1, 10, 24, scale=0.2).expand(3, -1, -1))
    yield "production", call(16, heads=8, dim=128, rank=32)
