"""Rotation against golden numbers, complex multiplication, its own symmetries and transformers."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError
from kvbackend.ops import apply_rope
from kvbackend.rope import cos_sin_table

EXACT = dict(rtol=1e-14, atol=1e-14)  # float64, a few operations
STYLES = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])


def table(rotary_dim: int, count: int = 64, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return cos_sin_table(count, rotary_dim, 1e2, dtype=dtype)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(7, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def positions() -> torch.Tensor:
    return torch.tensor([5, 0, 63, 17, 5, 1, 40])


@pytest.mark.parametrize(
    ("interleaved", "golden"),
    [
        (True, [-1.27223251, -1.83886499, 2.8786681, 4.08818664]),
        (False, [-1.41335252, 1.87911807, -2.82885748, 4.05819114]),
    ],
)
def test_golden(interleaved, golden):
    angles = 3 * torch.tensor([1.0, 0.01], dtype=torch.float64)
    cos_sin = torch.zeros(4, 4, dtype=torch.float64)
    cos_sin[3] = torch.cat((angles.cos(), angles.sin()))
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    got = apply_rope.reference(x, torch.tensor([3]), cos_sin, interleaved)
    assert got.flatten().tolist() == pytest.approx(golden, abs=6e-9)


@STYLES
def test_is_complex_multiplication(x, positions, interleaved):
    cos, sin = table(12)[positions].chunk(2, -1)
    pairs = x.unflatten(-1, (6, 2)) if interleaved else x.unflatten(-1, (2, 6)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
    pairs = torch.view_as_real(turned)
    want = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    assert_close(apply_rope.reference(x, positions, table(12), interleaved), want, **EXACT)


@STYLES
def test_dot_products_depend_on_distance_only(interleaved):
    q, k = torch.randn(2, 1, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def score(query_position: int, key_position: int) -> float:
        turned = [
            apply_rope.reference(rows, torch.tensor([at]), table(12), interleaved)
            for rows, at in ((q, query_position), (k, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    near = score(9, 4)
    assert score(60, 55) == pytest.approx(near, abs=1e-13)
    assert score(5, 0) == pytest.approx(near, abs=1e-13)
    assert score(9, 3) != pytest.approx(near, abs=1e-3)


@STYLES
@pytest.mark.parametrize("trailing", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 8, 12])
def test_inverse_undoes_and_lengths_stay(x, positions, interleaved, trailing, rotary_dim):
    how = dict(interleaved=interleaved, trailing=trailing)
    turned = apply_rope.reference(x, positions, table(rotary_dim), **how)
    assert (turned - x).abs().amax() > 0.1
    assert_close(turned.norm(dim=-1), x.norm(dim=-1), **EXACT)
    assert_close(apply_rope.reference(turned, positions, table(rotary_dim), **how, inverse=True), x, **EXACT)


@STYLES
def test_other_dims_stay_bit_for_bit(x, positions, interleaved):
    leading = apply_rope.reference(x, positions, table(8), interleaved)
    trailing = apply_rope.reference(x, positions, table(8), interleaved, trailing=True)
    whole = [apply_rope.reference(part, positions, table(8), interleaved) for part in (x[..., :8], x[..., 4:])]
    assert torch.equal(leading, torch.cat((whole[0], x[..., 8:]), -1))
    assert torch.equal(trailing, torch.cat((x[..., :4], whole[1]), -1))


def test_styles_differ_by_a_permutation(x, positions):
    order = torch.arange(12).reshape(2, 6).T.flatten()  # half-split place of each interleaved place
    half = apply_rope.reference(x, positions, table(12))
    assert torch.equal(apply_rope.reference(x[..., order], positions, table(12), interleaved=True), half[..., order])


def test_no_token_is_left_alone_whatever_its_row(x):
    x[2] = torch.nan
    x[2, 0, 0] = torch.inf
    got = apply_rope.reference(x, torch.tensor([-1, 3, -1, 0, -1, 1, 2]), table(12))
    for row in (0, 2, 4):
        assert torch.equal(got[row].view(torch.int64), x[row].view(torch.int64))
    assert got[[1, 3, 5, 6]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_rounded_once(x, positions, dtype):
    rows = x.to(dtype)
    for table_dtype in (torch.float32, dtype):
        cos_sin = table(12, dtype=table_dtype)
        want = apply_rope.reference(rows.float(), positions, cos_sin.float()).to(dtype)
        assert torch.equal(apply_rope.reference(rows, positions, cos_sin), want)


def test_equals_transformers(x, positions):
    pytest.importorskip("transformers", reason="transformers is absent: no outside implementation")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = table(12)[positions].chunk(2, -1)
    q = x.transpose(0, 1)[None]  # [1, H, T, D]
    angles = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    want, _ = apply_rotary_pos_emb(q, q, *angles)
    assert_close(apply_rope.reference(x, positions, table(12)), want[0].transpose(0, 1), **EXACT)
    want, _ = apply_rotary_pos_emb_interleave(q, q, *angles)  # returns first halves of pairs, then second halves
    got = apply_rope.reference(x, positions, table(12), interleaved=True)
    assert_close(torch.cat((got[..., 0::2], got[..., 1::2]), -1), want[0].transpose(0, 1), **EXACT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cos_sin=torch.zeros(8, 5)), "cos_sin rotates 5 dims; .*even"),
        (dict(cos_sin=torch.zeros(8, 14)), "cos_sin rotates 14 dims but x has 12; .*at most"),
        (
            dict(cos_sin=torch.zeros(8, 12, dtype=torch.float16)),
            "cos_sin is torch.float16 but x is torch.float32; .*float32",
        ),
        (dict(positions=torch.zeros(6, dtype=torch.int64)), r"positions \[T\] has T = 6; it must be 7"),
        (dict(positions=torch.zeros(7)), "positions is torch.float32; it must be torch.int32 or torch.int64"),
        (dict(x=torch.zeros(7, 12)), r"x has 2 dims, shape \[7, 12\]; it must be \[T, H, D\]"),
    ],
)
def test_refuses(change, message):
    call = dict(x=torch.zeros(7, 3, 12), positions=torch.zeros(7, dtype=torch.int64), cos_sin=torch.zeros(8, 12))
    with pytest.raises(ArgumentError, match=message):
        apply_rope(**call | change)


@pytest.mark.parametrize("position", [-2, 8])
def test_values(position):
    call = dict(x=torch.zeros(2, 1, 4), positions=torch.tensor([7, position]), cos_sin=torch.zeros(8, 4))
    with pytest.raises(ArgumentError, match=rf"positions holds position {position} at index 1; .*\[-1, 8\)"):
        apply_rope.check_values(apply_rope.bind((), call))
