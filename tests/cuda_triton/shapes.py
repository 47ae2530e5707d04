"""Calls of production size on device 'meta': what is compiled, and what a GPU is timed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvbackend import formats
from kvbackend.codecs import split

Call = tuple[str, str, dict[str, Any]]  # op, case, arguments


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _batch(num_seqs: int, queries: int, length: int, block_size: int) -> dict[str, Any]:
    return dict(
        block_table=_meta(num_seqs, length // block_size, dtype=torch.int32),
        seq_lens=_meta(num_seqs, dtype=torch.int32),
        cu_seqlens_q=_meta(num_seqs + 1, dtype=torch.int32),
        max_seqlen_q=queries,
    )


def _side(kv_format: str, shape: tuple[int, ...], role: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """A cache in a format, and its scales under the names `scale` and `scale_cache`."""
    fmt = formats.get(kv_format)
    cache = _meta(*split.codes_shape(fmt, shape), dtype=split.storage(fmt))
    scales = {}
    if fmt.global_scale:
        scales["scale"] = _meta(1, dtype=torch.float32)
    if fmt.quantized:
        static = fmt.granularity in split.STATIC
        scales["scale" if static else "scale_cache"] = _meta(
            *split.scales_shape(fmt, role, shape), dtype=split.scale_dtype(fmt)
        )
    return cache, scales


def paged(
    queries: int, kv_format: str = "bf16", group: int = 4, dim: int = 128, block_size: int = 16, **other: Any
) -> dict[str, Any]:
    """8 sequences of 4096 tokens over 8 kv heads."""
    shape = 8 * 4096 // block_size, block_size, 8, dim
    key_cache, k = _side(kv_format, shape, "key")
    value_cache, v = _side(kv_format, shape, "value")
    scales = {f"k_{name}": scale for name, scale in k.items()} | {f"v_{name}": scale for name, scale in v.items()}
    return dict(
        q=_meta(8 * queries, 8 * group, dim), key_cache=key_cache, value_cache=value_cache,
        **_batch(8, queries, 4096, block_size), **scales, softmax_scale=dim**-0.5, kv_format=kv_format, **other,
    )  # fmt: skip


def mla(queries: int, heads: int = 128) -> dict[str, Any]:
    """DeepSeek-V3: 8 sequences of 4096 tokens, latent and rotary part in one pool."""
    pages = _meta(512, 64, 576)
    return dict(
        q_nope=_meta(8 * queries, heads, 512), q_pe=_meta(8 * queries, heads, 64), ckv_cache=pages[..., :512],
        kpe_cache=pages[..., 512:], **_batch(8, queries, 4096, 64), softmax_scale=0.1,
    )  # fmt: skip


def calls() -> Iterator[Call]:
    """Every hot call."""
    yield "paged_attention", "decode, 32/8 heads of 128", paged(1)
    yield "paged_attention", "prefill, 32/8 heads of 128", paged(512)
    yield (
        "paged_attention",
        "decode, window and sinks, heads of 64",
        paged(1, dim=64, group=8, window=128, sinks=_meta(64)),
    )
    yield "paged_attention", "decode, heads of 256, softcap", paged(1, group=2, dim=256, softcap=50.0)
    yield "paged_attention", "prefill, heads of 256, softcap", paged(512, group=2, dim=256, softcap=50.0)
    for kv_format in ("fp8_e4m3", "int8", "mxfp8", "nvfp4", "int4"):
        yield "paged_attention", f"decode, {kv_format}", paged(1, kv_format, block_size=32)
    yield "mla_attention", "decode, 128 heads", mla(1)
    yield "mla_attention", "decode, 16 heads", mla(1, 16)
    yield "mla_attention", "prefill, 16 heads", mla(256, 16)
