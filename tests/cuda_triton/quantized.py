"""Calls of the cache ops and attention in every quantized format, which contract samples leave to `quantize_kv`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvbackend import codecs, formats
from kvbackend.codecs import split
from kvbackend.ops import registry

OPS = (
    "paged_attention", "mla_attention", "reshape_and_cache", "concat_and_cache_mla", "gather_cache", "store_rows",
    "accumulate_scores", "token_logits", "sparse_attention", "indexer_logits", "mla_project_kv",
)  # fmt: skip
PAGED = [
    "fp8_e4m3", "fp8_e5m2:head", "fp8_e4m3:channel", "fp8_e5m2:token_head", "fp8_e4m3:32", "int8", "mxfp8", "mxfp4",
    "nvfp4", "fp4_e2m1", "fp4_e2m1:channel", "int4", "int8/fp8_e4m3:head", "nvfp4/bf16",
]  # fmt: skip
LATENT = ["fp8_e4m3", "int8", "mxfp8", "mxfp4", "nvfp4"]
BLOCKS, BLOCK, HEADS, DIM = 5, 32, 2, 64


class Maker:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(11)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def side(self, kv_format: str, rows: Tensor, role: str) -> tuple[Tensor, dict[str, Tensor]]:
        """A cache that holds rows [nb, bs, Hk, D] in a format, and its scales as `scale` and `scale_cache`."""
        fmt = formats.get(kv_format)
        if not fmt.quantized:
            return rows.to(split.storage(fmt)), {}
        number = codecs.global_scale_of(rows) if fmt.global_scale else None
        codes, scales = codecs.encode(rows, fmt, role, number)
        if number is not None:
            return codes, {"scale": number, "scale_cache": scales}
        return codes, {"scale" if fmt.granularity in split.STATIC else "scale_cache": scales}

    def caches(self, kv_format: str) -> dict[str, Any]:
        sides: dict[str, Any] = {"kv_format": kv_format}
        for name, fmt, letter in zip(("key", "value"), formats.pair(kv_format), "kv", strict=True):
            cache, scales = self.side(fmt, self.randn(BLOCKS, BLOCK, HEADS, DIM), name)
            sides[f"{name}_cache"] = cache
            sides |= {f"{letter}_{part}": scale for part, scale in scales.items()}
        return sides

    def latent(self, kv_format: str, dim: int = DIM) -> dict[str, Any]:
        cache, scales = self.side(kv_format, self.randn(BLOCKS, BLOCK, 1, dim), "key")
        named = {f"k_{part}": scale if part == "scale" else scale[:, :, 0] for part, scale in scales.items()}
        return dict(ckv_cache=cache[:, :, 0], kpe_cache=self.randn(BLOCKS, BLOCK, 16), kv_format=kv_format, **named)


def _batch() -> dict[str, Any]:
    table = torch.tensor([[3, 0, 1 << 20], [4, 1, 1 << 20]], dtype=torch.int32)
    return dict(
        block_table=table, seq_lens=torch.tensor([64, 32]).int(), cu_seqlens_q=torch.tensor([0, 6, 7]).int(),
        max_seqlen_q=6, softmax_scale=0.2, return_lse=True,
    )  # fmt: skip


def _strange_rows(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with NaN and infinities into each record."""
    for name in formats.record_names():
        record = formats.record(name)
        rows = Maker(dtype).randn(5, sum(record.dims))
        rows[0, 3], rows[1, 0], rows[2, 100], rows[3, -1] = torch.nan, torch.inf, -torch.inf, torch.inf
        cache = torch.full((2, record.page_bytes(4)), 255, dtype=torch.uint8)
        slots = torch.tensor([5, 0, 7, 2, 3])
        yield f"{name}, NaN", dict(rows=rows, cache=cache, slot_mapping=slots, kv_format=name, block_size=4)


def _infinities(name: str, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Which heads that fill a tile up, and a position of -1, leave as they are."""
    samples = dict(registry[name].make_samples("cpu", dtype))
    if name == "indexer_logits":
        call = samples["rows past the batch"]
        keys = call["key_cache"].clone()
        keys[..., 3] = torch.where(keys[..., 3] > 0, torch.inf, keys[..., 3])
        yield "infinite keys", call | dict(key_cache=keys, weights=call["weights"].abs())
    else:
        call = samples["padding"]
        hidden = call["hidden"].clone()
        hidden[:, 4] = torch.inf
        yield "infinite rows", call | dict(hidden=hidden)


def calls(name: str, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """The op's calls, by format; and what more than samples show."""
    if name in ("indexer_logits", "mla_project_kv"):
        yield from _infinities(name, dtype)
        return
    if name == "accumulate_scores":  # each key gets an equal part, whatever digits the logits take
        alike = torch.ones(BLOCKS, BLOCK, HEADS, DIM, dtype=dtype)
        batch = {part: value for part, value in _batch().items() if part != "return_lse"}
        call = dict(q=Maker(dtype).randn(7, 3 * HEADS, DIM), key_cache=alike, scores=torch.zeros(2, HEADS, 64), **batch)
        yield "equal large logits", call | dict(softmax_scale=200.0)
    if name == "store_rows":
        yield from _strange_rows(dtype)
        return
    for kv_format in PAGED if name not in ("mla_attention", "concat_and_cache_mla") else LATENT:
        if kv_format == "nvfp4/bf16" and dtype is not torch.bfloat16:
            continue
        make = Maker(dtype)
        keys_by_group = kv_format == "int4"
        slots = torch.tensor([5, 0, -1, 77, 159])
        if name == "accumulate_scores" and kv_format in ("fp8_e4m3:channel", "nvfp4", "int4"):
            caches = {part: cache for part, cache in make.caches(kv_format).items() if not part.startswith("v")}
            batch = {part: value for part, value in _batch().items() if part != "return_lse"}
            q, scores = make.randn(7, 3 * HEADS, DIM), torch.zeros(2, HEADS, 64)
            yield kv_format, dict(q=q, scores=scores, **caches, **batch)
        elif name in ("paged_attention", "sparse_attention"):
            call = dict(q=make.randn(7, 3 * HEADS, DIM), **make.caches(kv_format), **_batch())
            yield kv_format, call | (sparse(make.generator) if name == "sparse_attention" else {})
        elif name == "token_logits":
            caches = {part: cache for part, cache in make.caches(kv_format).items() if not part.startswith("v")}
            batch = {part: value for part, value in _batch().items() if part not in ("softmax_scale", "return_lse")}
            pages = torch.randint(-1, 9, (7, HEADS, 3), generator=make.generator)
            ends = dict(page_size=8, num_sinks=3, num_recent=5)
            yield kv_format, dict(q=make.randn(7, 3 * HEADS, DIM), pages=pages, **caches, **batch, **ends)
        elif name == "reshape_and_cache":
            caches = make.caches(f"fp8_e4m3/{kv_format}" if keys_by_group else kv_format)
            yield (
                kv_format,
                dict(key=make.randn(5, HEADS, DIM), value=make.randn(5, HEADS, DIM), slot_mapping=slots, **caches),
            )
        elif name == "gather_cache" and "/" not in kv_format and not keys_by_group:
            cache, scales = make.side(kv_format, make.randn(BLOCKS, BLOCK, HEADS, DIM), "key")
            for out_format in ("auto", "bf16"):
                yield f"{kv_format}, {out_format}", dict(
                    cache=cache, kv_format=kv_format, out_format=out_format, **scales, num_tokens=50,
                    block_table=_batch()["block_table"], cu_seqlens=torch.tensor([0, 40, 47]).int(),
                )  # fmt: skip
        elif name == "mla_attention":
            yield (
                kv_format,
                dict(q_nope=make.randn(7, 3, DIM), q_pe=make.randn(7, 3, 16), **make.latent(kv_format), **_batch()),
            )
            if kv_format == "fp8_e4m3":
                q = dict(q_nope=make.randn(7, 64, 512), q_pe=make.randn(7, 64, 16))
                yield f"{kv_format}, 64 heads", dict(**q, **make.latent(kv_format, 512), **_batch())
        elif name == "concat_and_cache_mla":
            yield (
                kv_format,
                dict(ckv=make.randn(5, DIM), kpe=make.randn(5, 16), slot_mapping=slots, **make.latent(kv_format)),
            )


def sparse(generator: torch.Generator) -> dict[str, Any]:
    """Choices of the queries of `_batch`, and which tokens need none."""
    chosen = torch.randint(-1, 66, (7, HEADS, 20), generator=generator)
    return dict(topk_indices=chosen, page_size=4, num_sinks=3, num_recent=5)


def batch_mates() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Per op a mixed batch, and its last row alone: the same bits must come of both."""
    make = Maker(torch.bfloat16)
    mixed = _batch()
    alone = mixed | dict(
        block_table=mixed["block_table"][1:], seq_lens=mixed["seq_lens"][1:], max_seqlen_q=1,
        cu_seqlens_q=torch.tensor([0, 1]).int(),
    )  # fmt: skip
    caches, latent = make.caches("bf16"), make.latent("fp8_e4m3")
    q, q_nope, q_pe = make.randn(7, 6, DIM), make.randn(7, 3, DIM), make.randn(7, 3, 16)
    rings = dict(window_table=torch.tensor([[2, 1], [0, 4]]), window=9, compress_ratio=2)
    shared, new = (
        dict(window_cache=make.randn(BLOCKS, BLOCK, DIM), compressed_cache=make.randn(BLOCKS, BLOCK, DIM)),
        q[:, 0],
    )
    choices = sparse(make.generator)
    own_ring = rings | dict(window_table=rings["window_table"][1:])
    return {
        "shared_kv_attention": (
            dict(q=q, kv=new, **shared, **rings, **mixed),
            dict(q=q[6:], kv=new[6:], **shared, **own_ring, **alone),
        ),
        "paged_attention": (dict(q=q, **caches, **mixed), dict(q=q[6:], **caches, **alone)),
        "sparse_attention": (
            dict(q=q, **caches, **mixed, **choices),
            dict(q=q[6:], **caches, **alone, **choices | dict(topk_indices=choices["topk_indices"][6:])),
        ),
        "mla_attention": (
            dict(q_nope=q_nope, q_pe=q_pe, **latent, **mixed),
            dict(q_nope=q_nope[6:], q_pe=q_pe[6:], **latent, **alone),
        ),
    }
