"""Calls at the sizes where sparse attention broke in other engines: around windows, tiles and pages, and at their ends.

Lengths around 64, 128 and 1024, even and odd starts, prefixes found in a cache, drafts of speculative decoding, the
heads of one tensor-parallel rank, sequences that just see k keys or all that two levels look at, rows that choose
nothing or have gaps, slots and blocks of -1, NaN in every row that nobody wrote. Numbers of indexers are whole, so that
scores are exact, and equal ones are equal in every order of summing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from kvbackend import formats
from kvbackend.matrix import DTYPES
from kvbackend.ops import _pages, registry
from kvbackend.ops._samples import IndexPool, Maker, Pages
from kvbackend.rope import cos_sin_table

Call = dict[str, Any]

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 1025, 1026)
PREFIXES = (0, 7, 129, 128)
DRAFTS = (0, 1, 5, 31)
HEADS = (64, 32, 16)
LONG = 100  # tokens of which an interpreter gets the last alone: it takes minutes for all
TOPK = 512
NEAR = (0, 1, TOPK - 1, TOPK, TOPK + 1)  # how many a query sees
TWO_LEVELS = 2048 * 8  # as many keys as the first level keeps

HOST = torch.device("cpu")


def batches() -> Iterator[tuple[str, Call]]:
    """Lengths of queries and of sequences, with heads: each length after a prefix, beside a sequence of one token."""
    heads, prefixes = cycle(HEADS), cycle(PREFIXES)
    for length in LENGTHS:
        start = next(prefixes)
        sizes = dict(seq_lens=[length + start, 1], heads=next(heads) if length < 63 else 16)
        yield f"{length} tokens after {start}", dict(**sizes, q_lens=[length, 1])
        if length > LONG:
            yield f"the last 3 of {length + start} tokens", dict(**sizes, q_lens=[3, 1])
    for drafts in DRAFTS:
        seq_lens = [1 + drafts, 515]
        yield f"{drafts} drafts", dict(q_lens=[1 + drafts] * 2, seq_lens=seq_lens, heads=next(heads))


# ------------------------------------------------------------------------------------------------------ the indexer


class WholeNumbers(IndexPool):
    """Numbers that every format of index keys holds, and whose sums of products every dtype holds."""

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randint(-2, 3, shape, generator=self.generator).to(self.dtype).to(self.device)


def indexed(
    dtype: torch.dtype, q_lens: list[int], seq_lens: list[int], heads: int, compress_ratio: int = 1,
    kv_format: str = "auto", **other: Any,
) -> Call:  # fmt: skip
    blocks = sum(-(-length // compress_ratio // 64) for length in seq_lens) + 1
    pool = WholeNumbers(HOST, dtype, num_blocks=blocks, block_size=64, heads=heads, dim=128, kv_format=kv_format)
    return pool.call(q_lens, seq_lens, compress_ratio, **other)


def index_sizes() -> Iterator[tuple[str, Call]]:
    yield from batches()
    for ratio, kv_format in ((1, "auto"), (2, "auto"), (2, "index_mxfp4_68"), (2, "index_fp8_132")):
        seq_lens = [(count + 1) * ratio - 1 for count in NEAR]  # of the last entry all tokens but one
        sizes = dict(q_lens=[1] * len(NEAR), seq_lens=seq_lens, heads=64)
        yield f"{NEAR} keys of {ratio}, {kv_format}", dict(**sizes, compress_ratio=ratio, kv_format=kv_format)


FAR = dict(q_lens=[1, 1], seq_lens=[TWO_LEVELS, TWO_LEVELS + 1], heads=16)


def candidate_blocks() -> Iterator[tuple[str, Call]]:
    for name, sizes in index_sizes():
        yield name, dict(**sizes, num_candidates=TOPK // 8 if "keys" in name else 5)
    yield "around two levels", FAR


def lightning_indexer() -> Iterator[tuple[str, Call]]:
    for name, sizes in index_sizes():
        yield name, dict(**sizes, k=TOPK if "keys" in name else 24)
    yield "around two levels, but one", dict(**FAR, k=TOPK)
    yield "around two levels", dict(**FAR, k=TOPK, two_levels=True)


def selecting(dtype: torch.dtype, two_levels: bool = False, **sizes: Any) -> Call:
    call = indexed(dtype, **sizes)
    if two_levels:
        op = registry["candidate_blocks"]
        given = {name: value for name, value in call.items() if name in op.parameters}
        call["candidates"] = op.reference(**op.bind((), given))
    return call


def scores(dtype: torch.dtype, columns: int, lengths: list[int], order: str) -> Call:
    make = WholeNumbers(HOST, dtype)
    rows = make.randn(len(lengths), columns)
    for row, length in enumerate(lengths):
        rows[row, length:] = torch.inf  # whoever looks there selects it
    return dict(scores=rows, k=TOPK, lengths=make.ints(lengths), order=order)


def topk_indices() -> Iterator[tuple[str, Call]]:
    for order in ("score", "position"):
        for lengths in ([*NEAR], [*NEAR, TWO_LEVELS, TWO_LEVELS + 1]):
            yield f"{lengths} columns by {order}", dict(columns=max(lengths), lengths=lengths, order=order)


# -------------------------------------------------------------------------------------------------------- attention


def with_gaps(pool: Maker, q_lens: list[int], seq_lens: list[int], ratio: int, topk: int) -> Tensor:
    """Choices of each query [T, topk] among what it sees, with a -1 amid them; every third row chooses nothing."""
    chosen = []
    for new, length in zip(q_lens, seq_lens, strict=True):
        for position in range(length - new, length):
            picks = pool.permutation((position + 1) // ratio).tolist()[: topk - 1]
            picks.insert(len(picks) // 2, -1)
            chosen.append(((picks if len(chosen) % 3 else []) + [-1] * topk)[:topk])
    return pool.ints(chosen).reshape(sum(q_lens), topk)


def stored(rows: Tensor, kv_format: str) -> Tensor:
    """Pages of rows [nb, bs, D]; of records, the bytes of rows that are NaN are 255."""
    if kv_format == "auto":
        return rows
    blocks, block_size, _ = rows.shape
    pages = torch.full((blocks, formats.record(kv_format).page_bytes(block_size)), 255, dtype=torch.uint8)
    rows = rows.flatten(0, 1)
    _pages.write(pages, kv_format, torch.arange(len(rows)).masked_fill(rows[:, 0].isnan(), -1), rows, block_size)
    return pages


def sparse_mla(
    dtype: torch.dtype, q_lens: list[int], seq_lens: list[int], heads: int, topk: int = 24, kv_format: str = "auto"
) -> Call:
    rank, rope = 512, 64
    pool = Pages(HOST, dtype, num_blocks=sum(-(-length // 64) for length in seq_lens) + 1, block_size=64)
    batch, tables = pool.batch(q_lens, seq_lens)
    rows = torch.full((pool.num_blocks, 64, rank + rope), torch.nan, dtype=dtype)
    pool.fill(rows, tables, seq_lens)
    if kv_format == "auto":
        caches: Call = dict(ckv_cache=rows[..., :rank].contiguous(), kpe_cache=rows[..., rank:].contiguous())
    else:
        caches = dict(ckv_cache=stored(rows, kv_format), kpe_cache=None, kv_format=kv_format, block_size=64)
    queries = dict(q_nope=pool.randn(sum(q_lens), heads, rank), q_pe=pool.randn(sum(q_lens), heads, rope))
    chosen = with_gaps(pool, q_lens, seq_lens, 1, topk)
    return dict(**queries, **caches, **batch, topk_indices=chosen, softmax_scale=(rank + rope) ** -0.5)


def sparse_mla_attention() -> Iterator[tuple[str, Call]]:
    yield from batches()
    seq_lens = [*NEAR[1:]]
    for kv_format, heads in (("auto", 64), ("v32_fp8_656", 16), ("v32_fp8_656_ascend", 32)):
        sizes = dict(q_lens=[1] * len(seq_lens), seq_lens=seq_lens, heads=heads)
        yield f"{seq_lens} tokens, {kv_format}", dict(**sizes, topk=TOPK, kv_format=kv_format)


def shared_kv(
    dtype: torch.dtype, q_lens: list[int], seq_lens: list[int], heads: int, ratio: int, topk: int = 24,
    window_format: str = "auto", kv_format: str = "auto",
) -> Call:  # fmt: skip
    """A window of 128 in one block a sequence, and compressed entries in blocks of 64."""
    dim = 64 if max(q_lens) >= LONG else 512
    counts = [length // ratio for length in seq_lens]
    pool = Pages(HOST, dtype, num_blocks=sum(-(-count // 64) for count in counts) + 1, block_size=64)
    batch, tables = pool.batch(q_lens, counts)
    entries = torch.full((pool.num_blocks, 64, dim), torch.nan, dtype=dtype)
    pool.fill(entries, tables, counts)
    rings = pool.permutation(len(seq_lens) + 1)[: len(seq_lens)]
    window = torch.full((len(seq_lens) + 1, 128, dim), torch.nan, dtype=dtype)
    for ring, new, length in zip(rings.tolist(), q_lens, seq_lens, strict=True):
        held = torch.arange(max(length - new - 128, 0), length - new)
        window[ring, held % 128] = pool.randn(len(held), dim)
    return dict(
        q=pool.randn(sum(q_lens), heads, dim), kv=pool.randn(sum(q_lens), dim),
        window_cache=stored(window, window_format), window_table=rings[:, None].int(), window=128,
        window_format=window_format, compressed_cache=stored(entries, kv_format), kv_format=kv_format,
        compress_ratio=ratio, topk_indices=with_gaps(pool, q_lens, seq_lens, ratio, topk),
        **batch | dict(seq_lens=pool.ints(seq_lens)), softmax_scale=dim**-0.5, return_lse=True,
        sinks=Maker(HOST, torch.float32).randn(heads), cos_sin=cos_sin_table(max(seq_lens), 64, 1e4),
    )  # fmt: skip


def shared_kv_attention() -> Iterator[tuple[str, Call]]:
    for (name, sizes), ratio in zip(batches(), cycle((2, 1, 4, 2))):
        yield f"{name}, ratio {ratio}", dict(**sizes, ratio=ratio)
    seq_lens = [2 * count + 1 for count in NEAR]
    for window_format, kv_format, heads in (
        ("v4_fp8_584", "v4_fp8_584", 64), ("v41_fp8_528", "v41_fp8_528", 16), ("v41_fp8_528", "v41_fp4_288", 32),
    ):  # fmt: skip
        sizes = dict(q_lens=[1] * len(NEAR), seq_lens=seq_lens, heads=heads, ratio=2, topk=TOPK)
        yield f"{NEAR} entries, {kv_format}", dict(**sizes, window_format=window_format, kv_format=kv_format)


# ------------------------------------------------------------------------------------------------------- compressing


def compressed(
    dtype: torch.dtype, q_lens: list[int], seq_lens: list[int], ratio: int, overlap: bool, drafts: int = 0, **_: Any
) -> Call:
    """Tokens to compress, with the states that earlier ones left; the second sequence has none, and one block."""
    dim = 8
    make, single = Maker(HOST, dtype), Maker(HOST, torch.float32)
    width, ring, num_states = dim * (1 + overlap), ratio * (1 + overlap) - 1 + drafts, len(q_lens) + 2
    slots = make.permutation(num_states)[: len(q_lens)]
    slots[1] = -1
    state = torch.full((num_states, ring, 2 * width), torch.nan)
    for slot, new, length in zip(slots.tolist(), q_lens, seq_lens, strict=True):
        held = torch.arange(max(length - new - ring, 0), length - new)
        if slot >= 0:
            state[slot, held % max(ring, 1)] = single.randn(len(held), 2 * width)
    blocks = -(-max(seq_lens) // ratio // 8) + 1
    table = make.permutation(len(q_lens) * blocks).reshape(len(q_lens), blocks)
    table[1, 1:] = -1
    call: Call = dict(
        kv=make.randn(sum(q_lens), width), norm_weight=1 + make.randn(dim, scale=0.1), seq_lens=make.ints(seq_lens),
        cu_seqlens_q=make.ints([sum(q_lens[:i]) for i in range(len(q_lens) + 1)]), compress_ratio=ratio, eps=1e-6,
        overlap=overlap, cos_sin=cos_sin_table(max(seq_lens), 4, 1e4), block_table=table, block_size=8,
    )  # fmt: skip
    if ratio == 1:
        return call
    gates = dict(gate=make.randn(sum(q_lens), width), position_bias=single.randn(ratio, width))
    return dict(**call, **gates, state=state, state_slots=slots)


def compress_kv() -> Iterator[tuple[str, Call]]:
    for ratio, overlap in ((1, False), (2, False), (4, True), (128, False)):
        for name, sizes in batches():
            drafts = sizes["q_lens"][0] - 1 if "drafts" in name else 0
            yield f"{name}, ratio {ratio}", dict(**sizes, ratio=ratio, overlap=overlap, drafts=drafts)


# op -> the sizes of its calls, and what makes a call of them
OPS: dict[str, tuple[Callable[[], Iterator[tuple[str, Call]]], Callable[..., Call]]] = {
    "candidate_blocks": (candidate_blocks, indexed),
    "compress_kv": (compress_kv, compressed),
    "lightning_indexer": (lightning_indexer, selecting),
    "shared_kv_attention": (shared_kv_attention, shared_kv),
    "sparse_mla_attention": (sparse_mla_attention, sparse_mla),
    "topk_indices": (topk_indices, scores),
}


def calls(op: str, interpreted: bool = False) -> Iterator[tuple[str, torch.dtype, Call]]:
    """The op's calls, if any, each in one of the dtypes."""
    if op not in OPS:
        return
    sizes, make = OPS[op]
    for index, (name, call) in enumerate(sizes()):
        if interpreted and sum(call.get("q_lens", ())) > LONG:
            continue
        dtype = DTYPES[(index + index // len(DTYPES)) % len(DTYPES)]  # not the same ones with the same heads
        yield f"{name}, {str(dtype).removeprefix('torch.')}", dtype, make(dtype, **call)
