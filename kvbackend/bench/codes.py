"""Ops that write and read codes, in every format, against the rate at which this machine copies.

Bytes are those that an op must read and write. Rows count twice where a scale covers all tokens and is made from them,
since none can be coded before all are read; with scales given, as engines have them, they count once. Inputs come from
memory: each call takes the next of several that no cache holds together. Outputs are new each time, as the ops give
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..codecs import split
from ..ops import registry
from ..ops._samples import Maker
from ..ops.quantize_kv import every_format
from . import peers
from .timing import Case

TOKENS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8192, 8, 128, 16
INPUTS = 4  # 16 MiB of rows each
CACHE_FORMATS = ("fp8_e4m3:token_head", "fp8_e4m3", "int8", "mxfp8", "mxfp4", "nvfp4", "fp4_e2m1")
LAYOUTS = (
    ("v32_fp8_656", "v32_fp8_656_ascend"),
    ("v4_fp8_584", "v4_fp8_640_ascend"),
    ("v4_fp8_584_ascend", "v4_fp8_584"),
    ("v41_fp8_528", "v41_fp8_528_planar"),
    ("v41_fp4_288_planar", "v41_fp4_288"),
    ("index_fp8_132", "v41_index_fp8_132"),
)


def _copied(
    op: str, case: str, calls: list[dict[str, Any]], kv_format: str, moved_bytes: int, peer: peers.Peer | None = None
) -> Case:
    named = {} if peer is None else {"torch.compile": peer}
    return Case(op, case, calls, kv_format=kv_format, moved_bytes=moved_bytes, limit="copy_gbs", peers=named)


def _quantized_formats() -> Iterator[tuple[str, str]]:
    for name, role in every_format():
        if formats.get(name).quantized:
            yield name, role


def _global_scale(kv_format: str) -> Tensor | None:
    return torch.tensor([0.002]) if formats.get(kv_format).global_scale else None


def quantize(make: Maker, *, others: bool) -> Iterator[Case]:
    """Rows to codes; under scales that cover all tokens also as engines do it, who give them."""
    rows = [make.randn(TOKENS, KV_HEADS, HEAD_DIM) for _ in range(INPUTS)]
    for kv_format, role in _quantized_formats():
        static = formats.get(kv_format).granularity in split.STATIC
        other = dict(kv_format=kv_format, global_scale=_global_scale(kv_format), role=role)
        codes, scales = registry["quantize_kv"](rows[0], **other)
        moved = rows[0].nbytes + codes.nbytes + scales.nbytes
        peer = peers.compiled_codec(kv_format, role, encode=True) if others else None
        calls = [dict(x=x, **other) for x in rows]
        yield _copied("quantize_kv", f"{role} rows", calls, kv_format, moved + static * rows[0].nbytes, peer)
        if static:
            given = [dict(scale=scales, **call) for call in calls]
            yield _copied("quantize_kv", f"{role} rows, scale given", given, kv_format, moved, peer)


def dequantize(make: Maker, *, others: bool) -> Iterator[Case]:
    """Codes to rows."""
    rows = [make.randn(TOKENS, KV_HEADS, HEAD_DIM) for _ in range(INPUTS)]
    for kv_format, role in _quantized_formats():
        other = dict(kv_format=kv_format, global_scale=_global_scale(kv_format), role=role)
        coded = [registry["quantize_kv"](x, **other) for x in rows]
        moved = rows[0].nbytes + sum(tensor.nbytes for tensor in coded[0])
        calls = [dict(codes=codes, scales=scales, **other) for codes, scales in coded]
        peer = peers.compiled_codec(kv_format, role, encode=False) if others else None
        yield _copied("dequantize_kv", f"{role} rows", calls, kv_format, moved, peer)


def _caches(make: Maker) -> Iterator[tuple[str, dict[str, Any], int]]:
    """For each format a cache of codes for TOKENS, and the bytes of its codes and scales."""
    for kv_format in CACHE_FORMATS:
        fmt = formats.get(kv_format)
        cache = make.codes(kv_format, (TOKENS // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM))
        stored = TOKENS * fmt.bytes_per_token(KV_HEADS, HEAD_DIM)
        assert cache["cache"].dtype is split.storage(fmt)
        yield kv_format, cache, stored


def _cloned(cache: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor if tensor is None else tensor.clone() for name, tensor in cache.items()}


def write(make: Maker, *, others: bool) -> Iterator[Case]:
    """Rows to codes in the slots of a cache."""
    rows = [make.randn(TOKENS, KV_HEADS, HEAD_DIM) for _ in range(INPUTS)]
    slots = make.permutation(TOKENS)
    for kv_format, cache, stored in _caches(make):
        other: dict[str, Any] = {}
        for side in ("key", "value"):
            own = _cloned(cache)
            other |= {f"{side}_cache": own["cache"], f"{side[0]}_scale": own["scale"]}
            other |= {f"{side[0]}_scale_cache": own["scale_cache"]}
        calls = [dict(key=x, value=x.flip(0), slot_mapping=slots, kv_format=kv_format, **other) for x in rows]
        yield _copied("reshape_and_cache", "random slots", calls, kv_format, 2 * (rows[0].nbytes + stored))


def gather(make: Maker, *, others: bool) -> Iterator[Case]:
    """Codes of cached blocks to rows."""
    table = make.permutation(TOKENS // BLOCK_SIZE).reshape(4, -1).int()
    bounds = torch.arange(5, dtype=torch.int32) * (TOKENS // 4)
    read = dict(block_table=table, cu_seqlens=bounds, num_tokens=TOKENS, out_format="bf16")
    for kv_format, cache, stored in _caches(make):
        calls = [dict(kv_format=kv_format, **read, **_cloned(cache)) for _ in range(INPUTS)]
        yield _copied("gather_cache", "random blocks", calls, kv_format, stored + 2 * TOKENS * KV_HEADS * HEAD_DIM)


def transcode(make: Maker, *, others: bool) -> Iterator[Case]:
    """Pages from one layout to another."""
    for source, target in LAYOUTS:
        size = formats.record(source).page_bytes(64)
        num_blocks = (16 << 20) // size
        pages = [torch.randint(0, 256, (num_blocks, size), dtype=torch.uint8) for _ in range(INPUTS)]
        other = dict(from_layout=source, to_layout=target, block_size=64)
        moved = num_blocks * (size + formats.record(target).page_bytes(64))
        calls = [dict(pages=each, **other) for each in pages]
        yield _copied("transcode", f"{source} to {target}", calls, "auto", moved)
