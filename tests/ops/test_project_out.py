"""Output projection against up-projected values, and a whole absorbed MLA step against golden numbers."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError
from kvbackend.ops import absorb_q, apply_rope, project_out

EXACT = dict(rtol=1e-13, atol=1e-13)  # float64 sums of a few dozen terms


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_equals_attention_over_up_projected_values():
    weights, w_uv, latents = randn(5, 3, 11).softmax(-1), randn(3, 6, 20), randn(11, 20)
    values = torch.stack([latents @ w_uv[head].T for head in range(3)], 1)  # [S, H, 6]
    want = torch.einsum("ths,shv->thv", weights, values)
    got = project_out.reference(torch.einsum("ths,sc->thc", weights, latents), w_uv)
    assert_close(got, want, **EXACT)


def test_each_head_meets_its_own_weight():
    latent, w_uv = randn(5, 3, 20), randn(3, 6, 20)
    got = project_out.reference(latent, w_uv)
    for head in range(3):
        assert_close(got[:, head], latent[:, head] @ w_uv[head].T, **EXACT)


def wave(seed: float, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(seed + 0.73 * torch.arange(count, dtype=torch.float64)).reshape(shape)


def test_golden_absorbed_mla():
    """One decode step: absorb, attend to latents and rotary keys, project out; and the same without absorption."""
    angles = torch.arange(5, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    latents, w_uk, w_uv = wave(10, 5, 6), wave(14, 2, 4, 6), wave(15, 2, 4, 6)
    kpe = apply_rope.reference(wave(11, 5, 1, 4), torch.arange(5), cos_sin, interleaved=True)[:, 0]
    q_nope = wave(12, 1, 2, 4)
    q_pe = apply_rope.reference(wave(13, 1, 2, 4), torch.tensor([4]), cos_sin, interleaved=True)
    rotary = torch.einsum("thd,sd->ths", q_pe, kpe)

    absorbed = torch.einsum("thc,sc->ths", absorb_q.reference(q_nope, w_uk), latents)
    weights = ((absorbed + rotary) * 8**-0.5).softmax(-1)
    out = project_out.reference(torch.einsum("ths,sc->thc", weights, latents), w_uv)
    golden = [[-0.16810142, -2.02909515, 1.49229775, 1.05521514], [-1.28391859, 0.33537828, 1.06504926, -1.03043407]]
    assert_close(out[0], torch.tensor(golden, dtype=torch.float64), rtol=0, atol=6e-9)

    keys, values = torch.einsum("sc,hdc->shd", latents, w_uk), torch.einsum("sc,hvc->shv", latents, w_uv)
    weights = ((torch.einsum("thd,shd->ths", q_nope, keys) + rotary) * 8**-0.5).softmax(-1)
    assert_close(out, torch.einsum("ths,shv->thv", weights, values), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_and_rounded_once(dtype):
    latent, w_uv = randn(5, 3, 64).to(dtype), randn(3, 6, 64).to(dtype)
    got = project_out.reference(latent, w_uv)
    exact = project_out.reference(latent.double(), w_uv.double())
    unit = torch.finfo(dtype).eps / 2  # rounding once; 1e-5 is what float32 sums may lose where terms cancel
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= exact.abs() * unit * 1.01 + 1e-5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(w_uv=torch.zeros(4, 6, 20)), "w_uv .*has H = 4; it must be 3, the H of latent"),
        (dict(w_uv=torch.zeros(3, 20, 6)), "w_uv .*has kv_lora_rank = 6; it must be 20"),
        (dict(w_uv=torch.zeros(3, 6, 20, dtype=torch.float16)), "w_uv is torch.float16 but latent is torch.float32"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match=message):
        project_out(**dict(latent=torch.zeros(5, 3, 20), w_uv=torch.zeros(3, 6, 20)) | change)
