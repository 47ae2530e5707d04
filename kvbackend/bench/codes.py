"""Ops that write and read codes, in every format, against the rate at which this machine copies.

Bytes are those that an op must read and write, each once: a scale for a whole tensor, for which rows are read twice,
gets no credit for the second time. Inputs come from memory: each call takes the next of several that no cache holds
together. Outputs are new each time, as the ops give them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..codecs import split
from ..dispatch import use
from ..native import missing
from ..ops import registry
from ..ops._samples import Maker
from ..ops.quantize_kv import every_format
from .timing import ROUNDS, Result, in_turn, interleaved, result_of

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


@dataclass(frozen=True)
class Case:
    """Calls of one op with different inputs, and the bytes that one of them moves."""

    op: str
    case: str
    kv_format: str
    calls: list[dict[str, Any]]
    moved_bytes: int


def format_times(names: Iterable[str], rounds: int = ROUNDS) -> list[Result]:
    """Every case of these ops on the CPU kernels; nothing for ops that have none here."""
    chosen = [name for name in names if name in CASES and not list(missing(registry[name], "cpu"))]
    if not chosen:
        return []
    source = torch.ones(1 << 24)  # 64 MiB
    target = torch.empty_like(source)
    results = []
    for name in chosen:
        for case in CASES[name](Maker(torch.device("cpu"), torch.bfloat16)):
            with use("cpu", ops=name), torch.no_grad():
                copy: Callable[[], Any] = partial(target.copy_, source)
                times = interleaved({"op": in_turn(name, case.calls), "copy": copy}, rounds)
            result = result_of(name, case.case, torch.bfloat16, "cpu", times["op"])
            result.kv_format, result.limit = case.kv_format, "copy_gbs"
            result.gbs = case.moved_bytes / result.median_us / 1e3
            share = case.moved_bytes / (2 * source.nbytes)
            result.of_limit = statistics.median(
                share * theirs / ours for ours, theirs in zip(times["op"], times["copy"], strict=True)
            )
            results.append(result)
    return results


def _quantized_formats() -> Iterator[tuple[str, str]]:
    for name, role in every_format():
        if formats.get(name).quantized:
            yield name, role


def _global_scale(kv_format: str) -> Tensor | None:
    return torch.tensor([0.002]) if formats.get(kv_format).global_scale else None


def _quantize(make: Maker) -> Iterator[Case]:
    rows = [make.randn(TOKENS, KV_HEADS, HEAD_DIM) for _ in range(INPUTS)]
    for kv_format, role in _quantized_formats():
        other = dict(kv_format=kv_format, global_scale=_global_scale(kv_format), role=role)
        outputs = registry["quantize_kv"](rows[0], **other)
        moved = rows[0].nbytes + sum(tensor.nbytes for tensor in outputs)
        yield Case("quantize_kv", f"{role} rows", kv_format, [dict(x=x, **other) for x in rows], moved)


def _dequantize(make: Maker) -> Iterator[Case]:
    rows = [make.randn(TOKENS, KV_HEADS, HEAD_DIM) for _ in range(INPUTS)]
    for kv_format, role in _quantized_formats():
        other = dict(kv_format=kv_format, global_scale=_global_scale(kv_format), role=role)
        coded = [registry["quantize_kv"](x, **other) for x in rows]
        moved = rows[0].nbytes + sum(tensor.nbytes for tensor in coded[0])
        calls = [dict(codes=codes, scales=scales, **other) for codes, scales in coded]
        yield Case("dequantize_kv", f"{role} rows", kv_format, calls, moved)


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


def _write(make: Maker) -> Iterator[Case]:
    rows = [make.randn(TOKENS, KV_HEADS, HEAD_DIM) for _ in range(INPUTS)]
    slots = make.permutation(TOKENS)
    for kv_format, cache, stored in _caches(make):
        other: dict[str, Any] = {}
        for side in ("key", "value"):
            own = _cloned(cache)
            other |= {f"{side}_cache": own["cache"], f"{side[0]}_scale": own["scale"]}
            other |= {f"{side[0]}_scale_cache": own["scale_cache"]}
        calls = [dict(key=x, value=x.flip(0), slot_mapping=slots, kv_format=kv_format, **other) for x in rows]
        yield Case("reshape_and_cache", "random slots", kv_format, calls, 2 * (rows[0].nbytes + stored))


def _gather(make: Maker) -> Iterator[Case]:
    table = make.permutation(TOKENS // BLOCK_SIZE).reshape(4, -1).int()
    bounds = torch.arange(5, dtype=torch.int32) * (TOKENS // 4)
    read = dict(block_table=table, cu_seqlens=bounds, num_tokens=TOKENS, out_format="bf16")
    for kv_format, cache, stored in _caches(make):
        calls = [dict(kv_format=kv_format, **read, **_cloned(cache)) for _ in range(INPUTS)]
        yield Case("gather_cache", "random blocks", kv_format, calls, stored + 2 * TOKENS * KV_HEADS * HEAD_DIM)


def _transcode(make: Maker) -> Iterator[Case]:
    for source, target in LAYOUTS:
        size = formats.record(source).page_bytes(64)
        num_blocks = (16 << 20) // size
        pages = [torch.randint(0, 256, (num_blocks, size), dtype=torch.uint8) for _ in range(INPUTS)]
        other = dict(from_layout=source, to_layout=target, block_size=64)
        moved = num_blocks * (size + formats.record(target).page_bytes(64))
        yield Case("transcode", f"{source} to {target}", "auto", [dict(pages=each, **other) for each in pages], moved)


CASES: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "quantize_kv": _quantize,
    "dequantize_kv": _dequantize,
    "reshape_and_cache": _write,
    "gather_cache": _gather,
    "transcode": _transcode,
}
