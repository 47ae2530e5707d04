"""The cached row of MLA against its formula, its symmetries and transformers' modules."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError, use
from kvbackend.ops import apply_rope, concat_and_cache_mla, mla_project_kv
from kvbackend.rope import cos_sin_table

RANK, ROPE, HIDDEN = 12, 4, 10
EXACT = dict(rtol=1e-13, atol=1e-13)  # float64 sums of a few dozen terms


def arguments(dtype: torch.dtype = torch.float64, num_tokens: int = 5, **change: object) -> dict[str, object]:
    generator = torch.Generator().manual_seed(7)
    return {
        "hidden": torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
        "w_kva": torch.randn(RANK + ROPE, HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
        "norm_weight": torch.rand(RANK, generator=generator, dtype=torch.float64).add(0.5).to(dtype),
        "cos_sin": cos_sin_table(64, ROPE, 1e2, dtype=torch.promote_types(dtype, torch.float32)),
        "positions": torch.tensor([3, 0, 63, 9, 9])[:num_tokens],
        "eps": 1e-6,
    } | change


def caches(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    pages = torch.full((3, 4, RANK + ROPE), torch.nan, dtype=dtype)
    slots = torch.tensor([7, -1, 0, 11])  # one token fewer than arguments() has
    return dict(ckv_cache=pages[..., :RANK], kpe_cache=pages[..., RANK:], slot_mapping=slots)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equals_the_formula_element_by_element(interleaved, eps):
    call = arguments(interleaved=interleaved, eps=eps)
    ckv, kpe = mla_project_kv.reference(**call)
    for token, position in enumerate(call["positions"].tolist()):
        row = [float(call["hidden"][token] @ call["w_kva"][i]) for i in range(RANK + ROPE)]
        size = (sum(value**2 for value in row[:RANK]) / RANK + eps) ** 0.5
        want = [row[i] / size * float(call["norm_weight"][i]) for i in range(RANK)]
        assert ckv[token].tolist() == pytest.approx(want, rel=1e-12)
        turned = apply_rope.reference(
            torch.tensor(row[RANK:], dtype=torch.float64)[None, None],
            torch.tensor([position]),
            call["cos_sin"],
            interleaved,
        )
        assert kpe[token].tolist() == pytest.approx(turned.flatten().tolist(), rel=1e-12)


def test_norm_takes_the_scale_out_of_the_latent_only():
    call = arguments(eps=0.0)
    ckv, kpe = mla_project_kv.reference(**call)
    scaled_ckv, scaled_kpe = mla_project_kv.reference(**call | dict(hidden=call["hidden"] * 64))
    assert_close(scaled_ckv, ckv, **EXACT)
    assert_close(scaled_kpe, kpe * 64, **EXACT)
    assert_close((ckv / call["norm_weight"]).square().mean(-1), torch.ones(5, dtype=torch.float64), **EXACT)


def test_caches_hold_what_is_returned():
    written, expected = caches(), caches()
    ckv, kpe = mla_project_kv.reference(**arguments(), **written)
    plain = mla_project_kv.reference(**arguments())
    assert torch.equal(ckv, plain[0])
    assert torch.equal(kpe, plain[1])
    concat_and_cache_mla.reference(ckv, kpe, **expected)
    for name, cache in written.items():
        assert_close(cache, expected[name], rtol=0, atol=0, equal_nan=True)
    assert written["ckv_cache"].isfinite().sum() == 3 * RANK


def test_equals_transformers():
    pytest.importorskip("transformers", reason="transformers is absent: no outside implementation")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm, apply_rotary_pos_emb_interleave

    call = arguments(torch.float32)
    norm = DeepseekV3RMSNorm(RANK, eps=call["eps"])
    norm.weight.data = call["norm_weight"]
    latent, rotary = torch.nn.functional.linear(call["hidden"], call["w_kva"]).split((RANK, ROPE), -1)
    angles = call["cos_sin"][call["positions"]]
    cos, sin = (torch.cat((half, half), -1)[None] for half in angles.chunk(2, -1))
    _, turned = apply_rotary_pos_emb_interleave(rotary[None, None], rotary[None, None], cos, sin)
    ckv, kpe = mla_project_kv.reference(**call)
    assert_close(ckv, norm(latent).detach(), rtol=1e-5, atol=1e-6)
    # theirs: the first halves of all pairs, then the second halves
    assert_close(torch.cat((kpe[:, 0::2], kpe[:, 1::2]), -1), turned[0, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_rounded_once(dtype):
    call = arguments(dtype)
    single = {
        name: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in call.items()
    }
    written = caches(dtype)
    got = mla_project_kv.reference(**call, **written)
    for part, want in zip(got, mla_project_kv.reference(**single), strict=True):
        assert torch.equal(part, want.to(dtype))
    assert torch.equal(written["ckv_cache"][1, 3], got[0][0])


def test_no_token_is_not_rotated():
    call = arguments(positions=torch.tensor([-1, 0, -1, 3, 3]))
    _, kpe = mla_project_kv.reference(**call)
    plain = (call["hidden"] @ call["w_kva"].T)[:, RANK:]
    assert_close(kpe[:3], plain[:3], **EXACT)
    assert (kpe[3:] - plain[3:]).abs().min() > 1e-3


@pytest.mark.parametrize("written", [False, True])
def test_opcheck_with_and_without_the_caches(written):
    with use("reference"):
        torch.library.opcheck(
            torch.ops.kvbackend.mla_project_kv.default,
            (),
            arguments(torch.float32) | (caches(torch.float32) if written else {}),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(w_kva=torch.zeros(15, HIDDEN)), "w_kva has 15 rows; it must have 16, the 12 of norm_weight plus the 4"),
        (dict(w_kva=torch.zeros(16, 9)), "w_kva .*has hidden_size = 9; it must be 10"),
        (dict(cos_sin=torch.zeros(64, 3), kpe_cache=torch.zeros(3, 4, 3)), "cos_sin rotates 3 dims; .*even"),
        (dict(cos_sin=torch.zeros(64, 4, dtype=torch.float16)), "cos_sin is torch.float16 but hidden is torch.float32"),
        (
            dict(norm_weight=torch.zeros(12, dtype=torch.float16)),
            "norm_weight is torch.float16 but hidden is torch.float32",
        ),
        (
            dict(kpe_cache=None),
            "only ckv_cache and slot_mapping given; ckv_cache, kpe_cache, slot_mapping come together",
        ),
        (dict(ckv_cache=None, kpe_cache=None), "only slot_mapping given"),
        (dict(slot_mapping=None), "only ckv_cache and kpe_cache given"),
        (
            dict(ckv_cache=torch.full((3, 4, RANK), torch.nan).half()),
            "ckv_cache is torch.float16 but hidden is torch.float32",
        ),
        (dict(kpe_cache=torch.zeros(3, 4, 6)), "kpe_cache .*has qk_rope_head_dim = 6; it must be 4, .*of cos_sin"),
        (dict(slot_mapping=torch.zeros(6, dtype=torch.int64)), "slot_mapping .*has T = 6; it must be at most 5"),
    ],
)
def test_refuses_before_any_write(change, message):
    call = arguments(torch.float32) | caches(torch.float32) | change
    with pytest.raises(ArgumentError, match=message):
        mla_project_kv(**call)
    assert call["ckv_cache"] is None or call["ckv_cache"].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(positions=torch.tensor([0, 0, 64, 0, 0])),
            r"positions holds position 64 at index 2; it must be in \[-1, 64\)",
        ),
        (dict(slot_mapping=torch.tensor([12])), r"slot_mapping holds slot 12 at index 0; it must be in \[-1, 12\)"),
    ],
)
def test_values(change, message, monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    call = arguments(torch.float32) | caches(torch.float32) | change
    with use("reference"), pytest.raises(ArgumentError, match=message):
        mla_project_kv(**call)
    assert call["ckv_cache"].isnan().all()
