"""Cache ops in quantized formats: what is written is quantize_kv's, what is read is dequantize_kv's, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbackend
from kvbackend import codecs, formats
from kvbackend.codecs import split
from kvbackend.ops import (
    concat_and_cache_mla,
    gather_cache,
    mla_attention,
    paged_attention,
    quantize_kv,
    reshape_and_cache,
)

PER_TOKEN = ["fp8_e4m3:token_head", "fp8_e5m2:token_head", "int8", "fp8_e4m3:32", "mxfp8", "mxfp4", "fp4_e2m1", "nvfp4"]
STATIC = ["fp8_e4m3", "fp8_e4m3:head", "fp8_e5m2:channel"]
HEADS, DIM, BLOCKS, BLOCK = 2, 32, 6, 4


@pytest.fixture(autouse=True)
def _reference():
    with kvbackend.use("reference"):
        yield


def side(kv_format: str, rows: torch.Tensor, role: str = "key") -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """An empty cache for rows [T, Hk, D] in a format, with its scales: codes all ones, so that stray writes show."""
    fmt = formats.get(kv_format)
    shape = BLOCKS, BLOCK, *rows.shape[1:]
    codes = torch.ones(split.codes_shape(fmt, shape), dtype=torch.uint8)
    cache = torch.ones_like(codes, dtype=torch.float32) if not fmt.quantized else codes.view(split.storage(fmt))
    static, paged = None, None
    if fmt.global_scale:
        static = codecs.global_scale_of(rows)
    elif fmt.granularity in split.STATIC:
        static = quantize_kv(rows, kv_format)[1]
    if fmt.quantized and fmt.granularity not in split.STATIC:
        paged = torch.ones(split.scales_shape(fmt, role, shape)).to(split.scale_dtype(fmt))
    return cache, {"scale": static, "scale_cache": paged}


def call(kv_format: str, key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
    key_format, value_format = formats.pair(kv_format)
    key_cache, k = side(key_format, key)
    value_cache, v = side(value_format, value, "value")
    return dict(
        key_cache=key_cache, value_cache=value_cache, kv_format=kv_format, k_scale=k["scale"],
        k_scale_cache=k["scale_cache"], v_scale=v["scale"], v_scale_cache=v["scale_cache"],
    )  # fmt: skip


def dequantized(
    kv_format: str, rows: torch.Tensor, scales: dict[str, torch.Tensor | None] | None = None
) -> torch.Tensor:
    fmt = formats.get(kv_format)
    global_scale = codecs.global_scale_of(rows) if fmt.global_scale else None
    return codecs.decode(*codecs.encode(rows, fmt, global_scale=global_scale), fmt, global_scale=global_scale)


@pytest.mark.parametrize("kv_format", [*PER_TOKEN, *STATIC, "int8/fp8_e4m3:head", "fp4_e2m1/fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_reads_back_as_the_codec_says(kv_format: str, dtype: torch.dtype) -> None:
    if kv_format.endswith("fp32") and dtype is not torch.float32:
        kv_format = kv_format.replace("fp32", "bf16")
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(7, HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
    arguments = call(kv_format, key, value)
    if not formats.get(formats.pair(kv_format)[1]).quantized:
        arguments["value_cache"] = arguments["value_cache"].to(dtype)
    slots = torch.tensor([5, 0, 23, -1, 9, 10, 11])
    reshape_and_cache(key, value, slot_mapping=slots, **arguments)
    table = torch.arange(BLOCKS, dtype=torch.int32)[None]
    for name, prefix, rows, fmt in zip(
        ("key_cache", "value_cache"), "kv", (key, value), formats.pair(kv_format), strict=True
    ):
        got = gather_cache(
            arguments[name], table, torch.tensor([0, 24], dtype=torch.int32), 24, kv_format=fmt,
            scale=arguments[f"{prefix}_scale"], scale_cache=arguments[f"{prefix}_scale_cache"], out_format="fp32",
        )  # fmt: skip
        used = slots >= 0
        assert torch.equal(got[slots[used]], dequantized(fmt, rows)[used].float())
    untouched = [slot for slot in range(24) if slot not in slots.tolist()]
    plain = arguments["key_cache"].view(torch.uint8).flatten(0, 1)[untouched]
    assert bool((plain == 1).all()), "only named slots are written"


@pytest.mark.parametrize("kv_format", [*PER_TOKEN, *STATIC, "int8/fp8_e4m3:head", "fp4_e2m1/fp32"])
def test_attention_over_codes_is_attention_over_what_they_stand_for(kv_format: str) -> None:
    generator = torch.Generator().manual_seed(4)
    key, value = (torch.randn(13, HEADS, DIM, generator=generator) for _ in range(2))
    q = torch.randn(3, 4, DIM, generator=generator)
    arguments = call(kv_format, key, value)
    table = torch.tensor([[4, 0, 5, 2]], dtype=torch.int32)
    slots = (table[0].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:13]
    reshape_and_cache(key, value, slot_mapping=slots, **arguments)
    batch = dict(
        block_table=table, seq_lens=torch.tensor([13], dtype=torch.int32), max_seqlen_q=3, softmax_scale=0.2,
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32), return_lse=True,
    )  # fmt: skip
    out, lse = paged_attention(q, **arguments, **batch)
    key_format, value_format = formats.pair(kv_format)
    plain_key, plain_value = torch.full((2, BLOCKS, BLOCK, HEADS, DIM), torch.nan)
    reshape_and_cache(dequantized(key_format, key), dequantized(value_format, value), plain_key, plain_value, slots)
    want, want_lse = paged_attention(q, plain_key, plain_value, **batch)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_format", ["fp8_e4m3:token_head", "fp4_e2m1", "fp8_e4m3", "nvfp4", "auto"])
def test_latent_caches(kv_format: str) -> None:
    """The latent is quantized, the rotary part is not."""
    generator = torch.Generator().manual_seed(5)
    ckv, kpe = torch.randn(9, 64, generator=generator), torch.randn(9, 8, generator=generator)
    q_nope, q_pe = torch.randn(2, 3, 64, generator=generator), torch.randn(2, 3, 8, generator=generator)
    scales: dict[str, torch.Tensor | None] = {"scale": None, "scale_cache": None}
    cache, stands_for = torch.full((BLOCKS, BLOCK, 64), torch.nan), ckv
    if kv_format != "auto":
        cache, scales = side(kv_format, ckv[:, None])
        cache, stands_for = cache[:, :, 0], dequantized(kv_format, ckv[:, None])[:, 0]
        if scales["scale_cache"] is not None:
            scales["scale_cache"] = scales["scale_cache"][:, :, 0]
    kpe_cache = torch.full((BLOCKS, BLOCK, 8), torch.nan)
    named = dict(k_scale=scales["scale"], k_scale_cache=scales["scale_cache"], kv_format=kv_format)
    slots = torch.arange(8, 17)
    concat_and_cache_mla(ckv, kpe, cache, kpe_cache, slots, **named)
    batch = dict(
        block_table=torch.tensor([[2, 3, 4]], dtype=torch.int32), seq_lens=torch.tensor([9], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32), max_seqlen_q=2, softmax_scale=0.1,
    )  # fmt: skip
    out, _ = mla_attention(q_nope, q_pe, cache, kpe_cache, **batch, **named)
    plain, plain_kpe = torch.full((BLOCKS, BLOCK, 64), torch.nan), torch.full((BLOCKS, BLOCK, 8), torch.nan)
    concat_and_cache_mla(stands_for, kpe, plain, plain_kpe, slots)
    want, _ = mla_attention(q_nope, q_pe, plain, plain_kpe, **batch)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(kpe_cache[2:4].flatten(0, 1), kpe[:8])


def test_wrong_scales_are_told_before_any_write() -> None:
    key = value = torch.randn(2, HEADS, DIM)
    for kv_format, change, message in [
        ("fp8_e4m3", dict(k_scale=None), "k_scale is None; kv_format 'fp8_e4m3' has scales"),
        ("fp8_e4m3", dict(k_scale=torch.ones(2)), r"k_scale has shape \[2\].*\[1\]"),
        ("fp8_e4m3:head", dict(v_scale=torch.ones(3)), r"v_scale has shape \[3\].*\[2\]"),
        ("int8", dict(k_scale=torch.ones(1)), "k_scale is given; kv_format 'int8' has no such scale"),
        ("int8", dict(k_scale_cache=None), "k_scale_cache is None"),
        ("int8", dict(k_scale_cache=torch.ones(BLOCKS, BLOCK, HEADS, 2)), "k_scale_cache has shape"),
        ("mxfp4", dict(k_scale_cache=torch.ones(BLOCKS, BLOCK, HEADS, 1)), "k_scale_cache is torch.float32"),
        (
            "mxfp4",
            dict(key_cache=torch.zeros(BLOCKS, BLOCK, HEADS, DIM, dtype=torch.uint8)),
            "holds rows of 64 numbers",
        ),
        (
            "int8",
            dict(key_cache=torch.zeros(BLOCKS, BLOCK, HEADS, DIM)),
            "key_cache is torch.float32; kv_format 'int8'",
        ),
        ("nvfp4", dict(k_scale=None), "one for the whole tensor"),
    ]:
        good = call(kv_format, key, value) | dict(slot_mapping=torch.tensor([0, 1]))
        with pytest.raises(kvbackend.ArgumentError, match=message):
            reshape_and_cache(key, value, **(good | change))
        assert bool((good["value_cache"].view(torch.uint8) == 1).all())
    with pytest.raises(kvbackend.ArgumentError, match="shares key scales across tokens"):
        reshape_and_cache(
            key, value, torch.zeros(BLOCKS, 32, HEADS, DIM // 2, dtype=torch.uint8),
            torch.zeros(BLOCKS, 32, HEADS, DIM // 2, dtype=torch.uint8), torch.tensor([0, 1]), kv_format="int4",
        )  # fmt: skip


def test_kivi_pages_are_read() -> None:
    """Whole groups of 32 tokens: keys with scales per channel, values with scales per token."""
    generator = torch.Generator().manual_seed(6)
    key, value = (torch.randn(64, HEADS, DIM, generator=generator) for _ in range(2))
    key_codes, key_scales = codecs.encode(key, "int4", "key")
    value_codes, value_scales = codecs.encode(value, "int4", "value")
    pages = lambda rows, size: rows.unflatten(0, (2, size)).flip(0)  # noqa: E731  the second page first
    q = torch.randn(1, 4, DIM, generator=generator)
    batch = dict(
        block_table=torch.tensor([[1, 0]], dtype=torch.int32), seq_lens=torch.tensor([64], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), max_seqlen_q=1, softmax_scale=0.2,
    )  # fmt: skip
    out, _ = paged_attention(
        q, pages(key_codes, 32), pages(value_codes, 32), kv_format="int4", k_scale_cache=pages(key_scales, 1),
        v_scale_cache=pages(value_scales, 32), **batch,
    )  # fmt: skip
    plain = [
        pages(codecs.decode(*codecs.encode(rows, "int4", role), "int4", role), 32)
        for rows, role in ((key, "key"), (value, "value"))
    ]
    want, _ = paged_attention(q, *plain, **batch)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
