"""The mathematics of mla_attention's reference, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbackend
from kvbackend.ops import absorb_q, mla_attention, paged_attention, project_out
from kvbackend.ops._math import rotate
from tests.golden import wave


def reference(op: Any, **arguments: Any) -> Any:
    return op.reference(**op.bind((), arguments))


def batch(q_lens: list[int], seq_lens: list[int], block_size: int = 4) -> dict[str, Any]:
    width = max(-(-length // block_size) for length in seq_lens)
    return dict(
        block_table=torch.arange(len(seq_lens) * width, dtype=torch.int32).flip(0).view(len(seq_lens), width),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        max_seqlen_q=max(q_lens),
    )


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_is_attention_with_one_kv_head_whose_value_is_part_of_the_key() -> None:
    q, cache = draw(0, 4, 3, 20), draw(1, 6, 4, 20)
    call = batch([3, 1], [9, 7])
    out, lse = reference(
        mla_attention, q_nope=q[..., :16], q_pe=q[..., 16:], ckv_cache=cache[..., :16], kpe_cache=cache[..., 16:],
        softmax_scale=0.2, return_lse=True, **call,
    )  # fmt: skip
    pages = cache[:, :, None]
    want, want_lse = reference(
        paged_attention, q=q, key_cache=pages, value_cache=pages[..., :16], softmax_scale=0.2, return_lse=True, **call
    )
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("causal", [True, False])
def test_absorbed_equals_naive(causal: bool) -> None:
    """Up-projecting every key and value, and attending to them, gives what the latent space gives."""
    heads, nope, rope, v_dim, rank, length, n = 3, 5, 4, 6, 8, 7, 3
    ckv, kpe = draw(0, length, rank), draw(1, length, rope)
    q_nope, q_pe = draw(2, n, heads, nope), draw(3, n, heads, rope)
    w_uk, w_uv = draw(4, heads, nope, rank), draw(5, heads, v_dim, rank)
    scale = (nope + rope) ** -0.5

    keys = torch.cat((torch.einsum("hdc,sc->shd", w_uk, ckv), kpe[:, None].expand(-1, heads, -1)), -1)
    values = torch.einsum("hdc,sc->shd", w_uv, ckv)
    logits = torch.einsum("nhd,shd->hns", torch.cat((q_nope, q_pe), -1), keys) * scale
    if causal:
        position = torch.arange(length - n, length)
        logits = logits.masked_fill(torch.arange(length) > position[:, None], -torch.inf)
    want = torch.einsum("hns,shd->nhd", logits.softmax(-1), values)

    call = batch([n], [length])
    pages = torch.zeros(2, 4, rank + rope, dtype=torch.float64)
    rows = pages.view(8, -1)
    table = call["block_table"][0].long()
    slots = (table[:, None] * 4 + torch.arange(4)).flatten()[:length]
    rows[slots] = torch.cat((ckv, kpe), -1)
    latent, _ = reference(
        mla_attention, q_nope=reference(absorb_q, q_nope=q_nope, w_uk=w_uk), q_pe=q_pe, ckv_cache=pages[..., :rank],
        kpe_cache=pages[..., rank:], softmax_scale=scale, causal=causal, **call,
    )  # fmt: skip
    torch.testing.assert_close(reference(project_out, latent=latent, w_uv=w_uv), want, rtol=1e-12, atol=1e-12)


def test_golden_absorbed_decode() -> None:
    """Fixed numbers: 2 heads, 5 cached tokens, rotary angles 1 and 0.01."""
    angles = torch.arange(5).double()[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    ckv, kpe = wave(10.0, 5, 6), rotate(wave(11.0, 5, 4), angles.cos(), angles.sin(), interleaved=True)
    q_pe = rotate(wave(13.0, 2, 4), angles[4].cos(), angles[4].sin(), interleaved=True)
    q_nope = reference(absorb_q, q_nope=wave(12.0, 2, 4)[None], w_uk=wave(14.0, 2, 4, 6))
    call = batch([1], [5], block_size=5)
    latent, _ = reference(
        mla_attention,
        q_nope=q_nope,
        q_pe=q_pe[None],
        ckv_cache=ckv[None],
        kpe_cache=kpe[None],
        softmax_scale=8**-0.5,
        **call,
    )
    out = reference(project_out, latent=latent, w_uv=wave(15.0, 2, 4, 6))[0]
    want = [[-0.16810142, -2.02909515, 1.49229775, 1.05521514], [-1.28391859, 0.33537828, 1.06504926, -1.03043407]]
    torch.testing.assert_close(out, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q_pe=torch.zeros(5, 2, 8)), "q_pe.*has H = 2; it must be 3, the H of q_nope"),
        (dict(q_nope=torch.zeros(5, 3, 16)), "ckv_cache holds rows of 32 numbers in format auto; q_nope needs 16"),
        (dict(kpe_cache=torch.zeros(14, 5, 8)), "kpe_cache.*has bs = 5; it must be 4"),
        (dict(kpe_cache=torch.zeros(14, 4, 8).half()), "kpe_cache is torch.float16 but q_nope is torch.float32"),
        (dict(k_scale=torch.ones(1)), "k_scale is given"),
        (dict(cu_seqlens_q=torch.tensor([2, 3, 5], dtype=torch.int32)), "cu_seqlens_q starts with 2"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wrong_calls(change: dict[str, Any], message: str, backend: str) -> None:
    good = dict(mla_attention.make_samples("cpu", torch.float32))["not causal"]
    with kvbackend.use(backend):
        mla_attention(**good)
        with pytest.raises(kvbackend.ArgumentError, match=message):
            mla_attention(**(good | change))
