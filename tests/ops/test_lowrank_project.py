"""Projection to a low rank and back, head by head."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError
from kvbackend.ops import lowrank_project, lowrank_reconstruct

EXACT = dict(rtol=1e-13, atol=1e-13)  # float64 sums of a few dozen terms


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def orthonormal(heads: int, dim: int) -> torch.Tensor:
    return torch.linalg.qr(randn(heads, dim, dim))[0]


def test_each_head_meets_its_own_matrix():
    x, projection, z, basis = randn(5, 3, 12), randn(3, 12, 7), randn(5, 3, 7), randn(3, 7, 12)
    for head in range(3):
        assert_close(lowrank_project.reference(x, projection)[:, head], x[:, head] @ projection[head], **EXACT)
        assert_close(lowrank_reconstruct.reference(z, basis)[:, head], z[:, head] @ basis[head], **EXACT)


def test_rows_of_the_subspace_come_back():
    """Reconstruct after project is the identity on what the basis spans, and removes the rest."""
    axes = orthonormal(3, 12)
    basis, rest = axes[..., :7].mT, axes[..., 7:].mT
    inside = lowrank_reconstruct.reference(randn(5, 3, 7), basis)
    outside = lowrank_reconstruct.reference(randn(5, 3, 5), rest)
    z = lowrank_project.reference(inside + outside, basis.mT)
    assert_close(lowrank_reconstruct.reference(z, basis), inside, **EXACT)
    assert_close(z, randn(5, 3, 7), **EXACT)


def test_full_rank_orthonormal_is_the_identity():
    axes = orthonormal(3, 12)
    x = randn(5, 3, 12)
    assert_close(lowrank_reconstruct.reference(lowrank_project.reference(x, axes), axes.mT), x, **EXACT)


def test_projected_queries_meet_latent_keys():
    """q . (z basis) = (q basis^T) . z: attention may stay in the latent space."""
    q, z, basis = randn(4, 3, 12), randn(6, 3, 7), randn(3, 7, 12)
    want = torch.einsum("thd,shd->ths", q, lowrank_reconstruct.reference(z, basis))
    assert_close(torch.einsum("thr,shr->ths", lowrank_project.reference(q, basis.mT), z), want, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("op", "inner", "outer"), [(lowrank_project, 96, 24), (lowrank_reconstruct, 24, 96)])
def test_sums_are_float32_and_rounded_once(op, inner, outer, dtype):
    x, matrix = randn(5, 3, inner).to(dtype), randn(3, inner, outer).to(dtype)
    got = op.reference(x, matrix)
    exact = op.reference(x.double(), matrix.double())
    unit = torch.finfo(dtype).eps / 2  # rounding once; 1e-5 is what float32 sums may lose where terms cancel
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= exact.abs() * unit * 1.01 + 1e-5).all()


@pytest.mark.parametrize("op", [lowrank_project, lowrank_reconstruct])
def test_nan_stays_in_its_row_and_head(op):
    x = randn(5, 3, 7)
    x[2, 1, 3] = torch.nan
    got = op.reference(x, randn(3, 7, 7))
    hit = torch.zeros(5, 3, dtype=torch.bool)
    hit[2, 1] = True
    assert torch.equal(got.isnan().all(-1), hit)
    assert torch.equal(got.isnan().any(-1), hit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(projection=torch.zeros(4, 8, 5)), "projection .*has Hk = 4; it must be 3, the Hk of x"),
        (dict(projection=torch.zeros(3, 9, 5)), "projection .*has D = 9; it must be 8"),
        (
            dict(projection=torch.zeros(3, 8, 9)),
            "rank 9 for heads of 8 dims; it must be at most 8: choose a lower rank",
        ),
        (
            dict(projection=torch.zeros(3, 8, 5, dtype=torch.float16)),
            "projection is torch.float16 but x is torch.float",
        ),
        (dict(x=torch.zeros(5, 24)), r"x has 2 dims, shape \[5, 24\]"),
    ],
)
def test_project_refuses(change, message):
    with pytest.raises(ArgumentError, match=message):
        lowrank_project(**dict(x=torch.zeros(5, 3, 8), projection=torch.zeros(3, 8, 5)) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(basis=torch.zeros(4, 5, 8)), "basis .*has Hk = 4; it must be 3, the Hk of z"),
        (dict(basis=torch.zeros(3, 6, 8)), "basis .*has r = 6; it must be 5"),
        (dict(basis=torch.zeros(3, 5, 4)), "rank 5 for heads of 4 dims; it must be at most 4: choose a lower rank"),
        (dict(basis=torch.zeros(3, 5, 8, dtype=torch.float16)), "basis is torch.float16 but z is torch.float"),
    ],
)
def test_reconstruct_refuses(change, message):
    with pytest.raises(ArgumentError, match=message):
        lowrank_reconstruct(**dict(z=torch.zeros(5, 3, 5), basis=torch.zeros(3, 5, 8)) | change)
