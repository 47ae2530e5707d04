"""Read sequences back out of a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float32, Index, Int32, Rows, need
from ..codecs import split
from ..spec import op
from . import _checks, _formats, _math
from ._samples import NO_BLOCK, MlaPool, Pool


@op(group="paged cache", exact=True)
def gather_cache(
    cache: Rows[Tensor, "nb bs *row"],
    block_table: Index[Tensor, "B max_blocks"],
    cu_seqlens: Int32[Tensor, "B+1"],
    num_tokens: int,
    seq_starts: Int32[Tensor, "B"] | None = None,
    kv_format: str = "auto",
    scale: Float32[Tensor, "*scale"] | None = None,
    scale_cache: Rows[Tensor, "nb *scales"] | None = None,
    out_format: str = "auto",
) -> Tensor:
    """Read sequences, or a stretch of each, out of a paged cache into one ragged tensor.

    cache         [nb, bs, *row]: a K or V cache [nb, bs, Hk, D] or one part of an MLA cache [nb, bs, D]; any strides
    block_table   [B, max_blocks], the blocks of each sequence; -1: no block
    cu_seqlens    [B+1], running sum of the tokens to read of each sequence; starts with 0
    num_tokens    rows of the output, known on the host; at least cu_seqlens[-1] (more: graph padding)
    seq_starts    [B], position of the first token to read of each sequence; None: 0
    kv_format     how a cached token reads: "auto", as the cache's dtype says, or the name of one of `kvbackend.formats`
    scale, scale_cache   the scales of a quantized format, as `reshape_and_cache` takes them for this cache
    out_format    "fp32", "bf16" or "fp16"; "auto": the cache's dtype, and float32 for a quantized format
    Returns [num_tokens, *row], dequantized, in out_format: the rows of sequence b at cu_seqlens[b] ..
    cu_seqlens[b+1]-1. Rows beyond cu_seqlens[-1], and rows of positions in a block that is -1 or beyond the table, are
    zeros.
    Table entries outside the positions read are not looked at, and NaN in other rows of a block reaches nothing.
    Undefined: a cu_seqlens that falls or passes num_tokens; on accelerators, a block outside the cache (the CPU kernel
    gives zeros).
    Source: the block tables of vLLM's paged attention (arXiv 2309.06180, section 4).
    """
    _need_tokens(num_tokens)
    _math.check_cu_seqlens(cu_seqlens, "cu_seqlens")
    slots = _math.gather_slots(block_table, cu_seqlens, num_tokens, seq_starts, cache.shape[1])
    cached = _cached(cache, kv_format, scale, scale_cache)
    dtype = _out_dtype(cached, out_format)
    if cache.shape[0] == 0 or cache.shape[1] == 0:
        return cache.new_zeros(num_tokens, *cached.row_shape(), dtype=dtype)
    rows = cached.rows_at(slots.clamp(min=0)).to(dtype)  # [num_tokens, *row]
    return rows.masked_fill(_math.expand(slots < 0, rows), 0)


def _cached(cache, kv_format, scale, scale_cache):
    return _formats.Cached("cache", cache, kv_format, "scale", scale, "scale_cache", scale_cache)


def _out_dtype(cached: _formats.Cached, out_format: str) -> torch.dtype:
    if out_format == "auto":
        return torch.float32 if cached.quantized else cached.cache.dtype
    return split.storage(formats.get(out_format))


def _need_tokens(num_tokens: Any) -> None:
    # not in `check`: what that reads, a resolved callable is bound to
    need(num_tokens >= 0, f"num_tokens is {num_tokens}; it must be at least 0: pass the rows of the output")


@gather_cache.check
def _(cache, kv_format, scale, scale_cache, out_format, **_):
    cached = _cached(cache, kv_format, scale, scale_cache)
    fmt = cached.format
    need(
        fmt is None or fmt.granularity != "kivi",
        f"kv_format is {kv_format!r}, whose groups span tokens; gather_cache reads formats with scales per token: "
        f"read it with paged_attention or dequantize whole groups with dequantize_kv",
    )
    need(
        not cached.quantized or cache.ndim >= 3,
        f"cache has {cache.ndim} dims; with kv_format {kv_format!r} it has blocks, slots and the codes of a row, at "
        f"least 3: reshape it",
    )
    cached.check("cache", cache)
    need(
        out_format in ("auto", "fp32", "bf16", "fp16"),
        f"out_format is {out_format!r}; it must be auto, fp32, bf16 or fp16: choose what the rows are wanted in",
    )


@gather_cache.values
def _(cache, block_table, cu_seqlens, num_tokens, seq_starts, **_):
    _checks.running_sum("cu_seqlens", cu_seqlens, num_tokens)
    capacity = block_table.shape[1] * cache.shape[1]
    lengths = cu_seqlens.diff()
    starts = torch.zeros_like(lengths) if seq_starts is None else seq_starts
    _checks.within("seq_starts", starts, 0, capacity + 1, "position", f"block_table covers {capacity} tokens")
    _checks.within(
        "cu_seqlens", starts + lengths, 0, capacity + 1, "an end at position", f"block_table covers {capacity} tokens"
    )
    _checks.within(
        "block_table", _math.gather_slots(block_table, cu_seqlens, num_tokens, seq_starts, cache.shape[1]),
        -1, cache.shape[0] * cache.shape[1], "a block whose token has slot", "-1 is no block",
    )  # fmt: skip


@gather_cache.fake
def _(cache, num_tokens, kv_format, scale, scale_cache, out_format, **_):
    _need_tokens(num_tokens)
    cached = _cached(cache, kv_format, scale, scale_cache)
    return cache.new_empty(num_tokens, *cached.row_shape(), dtype=_out_dtype(cached, out_format))


@gather_cache.samples
def _(device, dtype):
    def call(
        pool: Pool | MlaPool,
        lengths: list[int],
        starts: list[int] | None = None,
        part: int = 0,
        index_dtype: torch.dtype = torch.int32,
        **other: Any,
    ) -> dict[str, Any]:
        cache = pool.caches()[part]
        ends = [start + length for start, length in zip(starts or [0] * len(lengths), lengths, strict=True)]
        tables = pool.block_tables(ends)
        pool.fill(cache, tables, ends)
        width = max(map(len, tables), default=0) + 1
        padded = [table + [NO_BLOCK] * (width - len(table)) for table in tables]
        cumulated = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        return {
            "cache": cache,
            "block_table": pool.ints(padded, index_dtype).reshape(len(tables), width),
            "cu_seqlens": pool.ints(cumulated),
            "num_tokens": cumulated[-1],
            "seq_starts": None if starts is None else pool.ints(starts),
            **other,
        }

    for name, pool in Pool.variants(device, dtype):
        yield f"keys, {name}", call(pool, [13, 1])
        yield f"values, {name}", call(pool, [2, 0, 9], part=1)
    for name, mla in MlaPool.variants(device, dtype):
        yield f"latent, {name}", call(mla, [13, 1])
        yield f"rotary, {name}", call(mla, [2, 0, 9], part=1)
    small = Pool(device, dtype)
    yield "block borders", call(small, [3, 4, 5, 8])
    yield "from a later position", call(small, [3, 6, 0], [5, 4, 2])
    yield "graph padding", call(small, [3, 2], num_tokens=9)
    yield "int64 table", call(small, [5, 3], index_dtype=torch.int64)
    yield "empty", call(small, [0, 0])
    yield "only padding", call(small, [0], num_tokens=3)
    yield "empty batch", call(small, [])
    yield "empty batch, padded", call(small, [], num_tokens=2)
    holed = call(small, [10, 2])
    holed["block_table"][0, 1] = -1
    yield "missing block", holed
    none = call(Pool(device, dtype, num_blocks=0), [0], num_tokens=2)
    yield "no blocks", {**none, "block_table": small.ints([[-1]]), "cu_seqlens": small.ints([0, 2])}
    scales = small.randn(4, 3)
    yield "one number per token", {**call(small, [5]), "cache": scales, "block_table": small.ints([[2, 0]])}
    wide = call(small, [7, 3])
    table = wide["block_table"]
    yield "sliced table", {**wide, "block_table": table.repeat(1, 2)[:, : table.shape[1]]}
    shared = call(small, [6])
    yield (
        "one table for all",
        {
            **shared,
            "block_table": shared["block_table"].expand(3, -1),
            "cu_seqlens": small.ints([0, 6, 8, 12]),
            "num_tokens": 12,
        },
    )
    for kv_format in ("int8", "fp8_e4m3", "fp8_e5m2:head", "fp8_e4m3:channel", "mxfp8", "mxfp4", "nvfp4", "fp4_e2m1"):
        for layout in ("NHD", "HND"):
            codes = small.codes(kv_format, (small.num_blocks, small.block_size, 2, 64), layout=layout)
            yield f"{kv_format}, {layout}", call(small, [6, 3], num_tokens=11) | codes | dict(kv_format=kv_format)
        codes = small.codes(kv_format, (small.num_blocks, small.block_size, 32))
        read = dict(kv_format=kv_format, out_format=formats.of_dtype(str(dtype)).name)
        if kv_format != "fp8_e4m3:channel":
            yield f"{kv_format}, latent", call(small, [6, 0, 7], [2, 0, 1]) | codes | read
    odd = small.codes("int8", (small.num_blocks, small.block_size, 3, 7))
    yield "codes, odd dims", call(small, [5, 3]) | odd | dict(kv_format="int8", out_format="fp16")
