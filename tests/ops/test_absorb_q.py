"""Absorption against up-projected keys."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError
from kvbackend.ops import absorb_q

EXACT = dict(rtol=1e-13, atol=1e-13)  # float64 sums of a few dozen terms


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_scores_equal_those_of_up_projected_keys():
    q_nope, w_uk, latents = randn(5, 3, 8), randn(3, 8, 20), randn(11, 20)
    keys = torch.stack([latents @ w_uk[head].T for head in range(3)], 1)  # [S, H, 8]
    want = torch.einsum("thd,shd->ths", q_nope, keys)
    assert_close(torch.einsum("thc,sc->ths", absorb_q.reference(q_nope, w_uk), latents), want, **EXACT)


def test_each_head_meets_its_own_weight():
    q_nope, w_uk = randn(5, 3, 8), randn(3, 8, 20)
    got = absorb_q.reference(q_nope, w_uk)
    for head in range(3):
        assert_close(got[:, head], q_nope[:, head] @ w_uk[head], **EXACT)


def test_unit_weights_pick_dims():
    w_uk = torch.eye(8, dtype=torch.float64).repeat(3, 1, 1)
    assert torch.equal(absorb_q.reference(randn(5, 3, 8), w_uk), randn(5, 3, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_and_rounded_once(dtype):
    q_nope, w_uk = randn(5, 3, 64).to(dtype), randn(3, 64, 20).to(dtype)
    got = absorb_q.reference(q_nope, w_uk)
    exact = absorb_q.reference(q_nope.double(), w_uk.double())
    unit = torch.finfo(dtype).eps / 2  # rounding once; 1e-5 is what float32 sums may lose where terms cancel
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= exact.abs() * unit * 1.01 + 1e-5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(w_uk=torch.zeros(4, 8, 20)), "w_uk .*has H = 4; it must be 3, the H of q_nope"),
        (dict(w_uk=torch.zeros(3, 20, 8)), "w_uk .*has qk_nope_head_dim = 20; it must be 8"),
        (dict(w_uk=torch.zeros(3, 8, 20, dtype=torch.float16)), "w_uk is torch.float16 but q_nope is torch.float32"),
        (dict(q_nope=torch.zeros(5, 24)), r"q_nope has 2 dims, shape \[5, 24\]"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match=message):
        absorb_q(**dict(q_nope=torch.zeros(5, 3, 8), w_uk=torch.zeros(3, 8, 20)) | change)
