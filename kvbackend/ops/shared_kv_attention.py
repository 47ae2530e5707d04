"""Attention over a window of recent rows and over compressed rows, each of which is key and value of every head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float, Index, Int32, Rows, need
from ..rope import cos_sin_table
from ..spec import op
from . import _checks, _math, _pages
from ._samples import BATCHES, Maker, Pages

_HOLDS = ("shared_kv",)


@op(group="sparse attention")
def shared_kv_attention(
    q: Float[Tensor, "T H D"],
    window_cache: Rows[Tensor, "window_nb *window_page"],
    window_table: Index[Tensor, "B window_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    softmax_scale: float,
    window: int,
    kv: Float[Tensor, "T D"] | None = None,
    compressed_cache: Rows[Tensor, "nb *page"] | None = None,
    block_table: Index[Tensor, "B max_blocks"] | None = None,
    topk_indices: Int32[Tensor, "T topk"] | None = None,
    compress_ratio: int = 1,
    window_format: str = "auto",
    kv_format: str = "auto",
    sinks: Float[Tensor, "H"] | None = None,
    cos_sin: Float[Tensor, "P rotary_dim"] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend to the last `window` rows of a sequence and to compressed rows of all of it, in one softmax.

    The query at position t sees the rows at positions t - window + 1 to t, and of the compressed entries those below
    (t + 1) // compress_ratio: all of them, or the chosen ones. Tokens of the window are in compressed entries too: that
    counts twice, as the models mean it. Every row is key and value of every head, as it is.

    q               [T, H, D], RoPE applied; any strides
    window_cache    pages of the window's rows, [window_nb, bs, D] in q's dtype or records, and window_table
                    [B, window_blocks], each sequence's blocks: position p is row p % R of the R = window_blocks * bs
                    rows that the table names. With R = window it is a ring; with R beyond the sequence it is ordinary
                    paging. A block of -1 holds nothing
    seq_lens, cu_seqlens_q, max_seqlen_q   the batch, in tokens, as in paged_attention
    softmax_scale   head_dim ** -0.5 in DeepSeek-V4, which has no YaRN temperature
    window          tokens that a query sees, itself included
    kv              [T, D] the rows of this call's tokens. With it the cache holds earlier tokens only, the last
                    window - 1 at least, and is written after the call: a chunk longer than the ring cannot be in it.
                    Rows that will be stored as records must be passed as these give them back, or chunks would show
                    in the result. Without it the cache holds this call's tokens too: R is window - 1 + those, or more
    compressed_cache, block_table   pages [nb, bs, D] in q's dtype or records, and the blocks [B, max_blocks] of each
                    sequence's entries; none for layers that have a window only
    topk_indices    [T, topk] entries chosen for each query, in any order, each at most once; -1 is none. None of the
                    tensor: all that the query may see
    compress_ratio  tokens of a compressed entry
    window_format, kv_format   how window and compressed pages read: "auto", or a record of `kvbackend.formats`
    sinks           [H] logits that join each head's denominator, unscaled
    cos_sin         rotates the last rotary_dim dims of the result back at the query's position (interleaved pairs), as
                    models do whose values carry RoPE, or none
    Returns out [T, H, D] in q's dtype, and lse [T, H] float32, natural log, of window and entries together, without the
    sinks; empty unless return_lse. A query that sees nothing gives out 0 and lse -inf.
    Undefined: an entry chosen twice; on accelerators, blocks that the caches lack.
    Source: DeepSeek-V4 and V4.1 (arXiv 2609.19969) inference code; FlashMLA's sparse decoding with an extra cache.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    num_tokens, _, dim = q.shape
    if num_tokens == 0 or seq_lens.shape[0] == 0 or max_seqlen_q <= 0:
        return _math.nothing_seen(q, dim, return_lse)
    dtype = _math.compute_dtype(q)
    outs, lses = [], []
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        position = sequence.positions  # [n]
        new = cu_seqlens_q[sequence.index + 1] - cu_seqlens_q[sequence.index]  # also those that q lacks
        written = sequence.length - new if kv is not None else sequence.length
        every = torch.full_like(sequence.length, _ALL)
        rows, exists = _pages.gather(window_cache, window_format, window_table[sequence.index], every, dtype)
        last = written - 1
        index = torch.arange(len(rows), device=q.device)
        row_position = last - (last - index) % max(len(rows), 1)  # the newest position that the row can hold
        exists = exists & (row_position >= 0)
        parts, allowed = [rows], [exists[None] & _in_window(position, row_position, window)]
        if kv is not None:
            parts.append(kv[sequence.tokens].to(dtype))
            allowed.append((position >= 0)[None] & _in_window(position, position, window))
        if compressed_cache is not None and block_table is not None:
            table = block_table[sequence.index]
            entries, holds = _pages.gather(compressed_cache, kv_format, table, sequence.length // compress_ratio, dtype)
            entry = torch.arange(len(entries), device=q.device)
            visible = holds[None] & (entry[None] < (position[:, None] + 1) // compress_ratio)  # [n, entries]
            if topk_indices is not None:
                visible = visible & _chosen(topk_indices[sequence.tokens], len(entries))
            parts.append(entries)
            allowed.append(visible)
        k = torch.cat(parts)[:, None]  # one kv head
        seen = torch.cat(allowed, -1) & (position >= 0)[:, None]
        out, lse = _math.attend(q[sequence.tokens].to(dtype), k, k, seen, softmax_scale)
        if sinks is not None:
            out = _math.apply_sinks(out, lse, sinks)
        if cos_sin is not None:
            plain = dim - cos_sin.shape[1]
            turned = _math.rotate_at(out[..., plain:], position, cos_sin, interleaved=True, inverse=True)
            out = torch.cat((out[..., :plain], turned), -1)
        outs.append(out)
        lses.append(lse)
    out = _math.unpad(outs, cu_seqlens_q, num_tokens, 0.0).to(q.dtype)
    if not return_lse:
        return out, q.new_empty(0, dtype=torch.float32)
    return out, _math.unpad(lses, cu_seqlens_q, num_tokens, -torch.inf).float()


_ALL = 1 << 62  # as a length: all rows of the table


def _in_window(position: Tensor, row_position: Tensor, window: int) -> Tensor:
    """[n, rows] bool: which rows are no newer than a query and among the last `window` of it."""
    age = position[:, None] - row_position[None]
    return (age >= 0) & (age < window)


def _chosen(indices: Tensor, num_entries: int) -> Tensor:
    """[n, topk] entries, -1 for none -> [n, num_entries] bool."""
    used = (indices >= 0) & (indices < num_entries)
    marks = torch.zeros(len(indices), num_entries + 1, dtype=torch.bool, device=indices.device)
    return marks.scatter(1, torch.where(used, indices, num_entries).long(), True)[:, :num_entries]


@shared_kv_attention.check
def _(
    q, window_cache, window_table, window, kv, compressed_cache, block_table, topk_indices, compress_ratio,
    window_format, kv_format, cos_sin, **_,
):  # fmt: skip
    need(window >= 1, f"window is {window}; it must be at least 1, the query itself: pass the model's sliding_window")
    need(
        compress_ratio >= 1,
        f"compress_ratio is {compress_ratio}; it must be 1 or more: pass the tokens of a compressed entry",
    )
    _pages.check_pages("window_cache", window_cache, window_format, "q", q, _HOLDS)
    rows = window_table.shape[1] * _pages.block_size_of(window_cache, window_format)
    need(
        rows >= window - 1,
        f"window_table names {rows} rows; the window needs {window - 1} earlier ones: give each sequence more blocks",
    )
    if kv is not None:
        _checks.same_dtype("q", q, kv=kv)
    need(
        (compressed_cache is None) == (block_table is None),
        f"only {'block_table' if compressed_cache is None else 'compressed_cache'} is given; compressed_cache and "
        f"block_table come together: pass both, or neither",
    )
    need(
        topk_indices is None or compressed_cache is not None,
        "topk_indices is given without compressed_cache; it chooses among compressed entries: pass both",
    )
    if compressed_cache is not None:
        _pages.check_pages("compressed_cache", compressed_cache, kv_format, "q", q, _HOLDS)
    if cos_sin is not None:
        _checks.rotary_table("q", q, cos_sin)
        need(
            cos_sin.shape[1] <= q.shape[2],
            f"cos_sin rotates {cos_sin.shape[1]} dims but rows have {q.shape[2]}; it must be at most that: pass the "
            f"table of this model",
        )


@shared_kv_attention.values
def _(
    q, window_cache, window_table, seq_lens, cu_seqlens_q, max_seqlen_q, window, kv, compressed_cache, block_table,
    topk_indices, compress_ratio, window_format, kv_format, cos_sin, **_,
):  # fmt: skip
    _checks.queries(seq_lens, cu_seqlens_q, q.shape[0], max_seqlen_q)
    _checks.within("window_table", window_table, -1, window_cache.shape[0], "block", "-1 is no block")
    if kv is None:
        rows = window_table.shape[1] * _pages.block_size_of(window_cache, window_format)
        longest = max(cu_seqlens_q.diff().tolist(), default=0)
        need(
            longest == 0 or rows >= min(window - 1 + longest, int(seq_lens.max())),
            f"window_table names {rows} rows; without kv they must hold the window of the first of {longest} queries, "
            f"{window - 1 + longest} rows: pass kv, or give each sequence more blocks",
        )
    if block_table is not None and compressed_cache is not None:
        block_size = _pages.block_size_of(compressed_cache, kv_format)
        _checks.paged_batch(
            block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], compressed_cache.shape[0], block_size,
            compress_ratio,
        )  # fmt: skip
    if topk_indices is not None:
        ordered = topk_indices.sort(-1).values
        need(
            not bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()),
            f"topk_indices names an entry twice in one of its {len(ordered)} rows; each counts once: check its maker",
        )
    if cos_sin is not None:
        _checks.within("seq_lens", seq_lens, 0, cos_sin.shape[0] + 1, "length", "cos_sin has no more rows")


@shared_kv_attention.fake
def _(q, return_lse, **_):
    num_tokens, num_heads, _ = q.shape
    return (
        q.new_empty(q.shape),
        q.new_empty((num_tokens, num_heads) if return_lse else (0,), dtype=torch.float32),
    )


@shared_kv_attention.samples
def _(device, dtype):
    single = Maker(device, torch.float32)

    def stored(rows: Tensor, kv_format: str) -> Tensor:
        """Pages of rows [nb, bs, D]; where a row is NaN, all bytes of its record are 255."""
        if kv_format == "auto":
            return rows
        page_bytes = formats.record(kv_format).page_bytes(rows.shape[1])
        pages = torch.full((rows.shape[0], page_bytes), 255, dtype=torch.uint8, device=device)
        rows = rows.flatten(0, 1)
        slots = torch.arange(len(rows), device=device).masked_fill(rows[:, 0].isnan(), -1)
        _pages.write(pages, kv_format, slots, rows)
        return pages

    def call(
        pool: Pages, q_lens: list[int], seq_lens: list[int], window: int = 5, ratio: int = 0, topk: int = 0,
        heads: int = 3, dim: int = 16, ring: int = 0, window_block: int = 2, written: bool = False,
        window_format: str = "auto", kv_format: str = "auto", **other: Any,
    ) -> dict[str, Any]:  # fmt: skip
        tokens = sum(q_lens)
        if written:
            ring = ring or window - 1 + max(q_lens, default=1)
        blocks = -(-(ring or window) // window_block)
        rings = Pages(device, dtype, num_blocks=len(seq_lens) * blocks + 1, block_size=window_block)
        rows = rings.permutation(len(seq_lens) * blocks).tolist()  # the last block stays nobody's
        tables = [rows[i * blocks : (i + 1) * blocks] for i in range(len(seq_lens))]
        pages = torch.full((rings.num_blocks, window_block, dim), torch.nan, dtype=dtype, device=device)
        for table, new, length in zip(tables, q_lens, seq_lens, strict=True):
            size = blocks * window_block
            end = length if written else length - new
            for position in range(max(end - size, 0), end):
                pages[table[position % size // window_block], position % window_block] = rings.randn(dim)
        counts = [length // ratio if ratio else 0 for length in seq_lens]
        batch, lists = pool.batch(q_lens, counts)
        block_table = batch.pop("block_table")
        arguments = dict(
            q=rings.randn(tokens, heads, dim),
            window_cache=stored(pages, window_format),
            window_table=rings.ints(tables).reshape(len(seq_lens), blocks),
            **batch | dict(seq_lens=rings.ints(seq_lens)),
            softmax_scale=dim**-0.5,
            window=window,
            window_format=window_format,
            kv=None if written else rings.randn(tokens, dim),
            sinks=single.randn(heads),
            return_lse=True,
        )
        if ratio:
            pages = torch.full((pool.num_blocks, pool.block_size, dim), torch.nan, dtype=dtype, device=device)
            pool.fill(pages, lists, counts)
            arguments.update(compressed_cache=stored(pages, kv_format), block_table=block_table)
            arguments.update(compress_ratio=ratio, kv_format=kv_format)
        if topk:
            chosen = []
            for new, length in zip(q_lens, seq_lens, strict=True):
                for position in range(length - new, length):
                    picks = pool.permutation(max(position + 1, 0) // ratio).tolist()[:topk]
                    chosen.append([-1] * (topk - len(picks)) + picks)
            arguments.update(topk_indices=pool.ints(chosen).reshape(tokens, topk))
        return {**arguments, **other}

    for name, q_lens, seq_lens in BATCHES:
        yield name, call(Pages(device, dtype, num_blocks=20), q_lens, seq_lens, ratio=2, topk=3)
    pool = Pages(device, dtype, num_blocks=20)
    mixed = [1, 4, 7], [9, 7, 23]
    table = cos_sin_table(64, 6, 1e4, device=device)
    yield "window only", call(pool, *mixed)
    yield "all entries", call(pool, *mixed, ratio=4)
    yield "ratio 1", call(pool, *mixed, ratio=1, topk=6)
    yield "rotated back", call(pool, *mixed, ratio=2, topk=3, cos_sin=table)
    yield "no sinks, no lse", call(pool, *mixed, ratio=2, topk=3, sinks=None, return_lse=False)
    yield "window of 1", call(pool, *mixed, window=1, ring=2, ratio=2)
    yield "ring longer than the window", call(pool, *mixed, ring=9, ratio=2)
    yield "window pages of the whole sequence", call(pool, *mixed, ring=24, ratio=2)
    yield "rows written before", call(pool, *mixed, written=True, ratio=2, topk=3)
    yield (
        "decode, rows written before",
        call(pool, [1, 1], [3, 17], written=True, ratio=2, topk=3, cos_sin=table),
    )
    yield "nothing chosen", call(pool, *mixed, ratio=2) | dict(topk_indices=pool.ints([[-1, -1]] * 12))
    unseen = call(pool, *mixed, ratio=2, topk=3)
    yield "entries of the future", unseen | dict(topk_indices=pool.ints([[20, 0, 900]] * 12))
    lost = unseen["block_table"].long()
    lost[:, 0] = -1
    yield "freed first block, int64 table", unseen | dict(block_table=lost)
    gone = unseen["window_table"].clone()
    gone[:, 1] = -1
    yield "freed window block", unseen | dict(window_table=gone)
    more = dict(
        q=torch.cat((unseen["q"], pool.randn(2, 3, 16))), kv=torch.cat((unseen["kv"], pool.randn(2, 16))),
        topk_indices=torch.cat((unseen["topk_indices"], pool.ints([[0, 1, 2]] * 2))),
    )  # fmt: skip
    yield "rows past the batch", unseen | more
    yield "large logits", call(pool, *mixed, ratio=2, softmax_scale=100.0)
    yield "one head, odd dims", call(pool, *mixed, ratio=2, heads=1, dim=7)
    yield "transposed q", unseen | dict(q=pool.randn(3, 12, 16).transpose(0, 1))
    fused = pool.randn(12, 40)
    yield "sliced rows", unseen | dict(kv=fused[:, 24:])
    wide: dict[str, Any] = dict(dim=512, window=6, ratio=2, topk=3)
    for window_format, kv_format in (
        ("v4_fp8_584", "v4_fp8_584"),
        ("v4_fp8_640_ascend", "v4_fp8_640_ascend"),
        ("v41_fp8_528", "v41_fp8_528"),
        ("v41_fp8_528", "v41_fp4_288"),
        ("v41_fp8_528_planar", "v41_fp4_288_planar"),
        ("auto", "v41_fp4_288"),
    ):
        name = f"{window_format} and {kv_format}"
        yield name, call(pool, *mixed, window_format=window_format, kv_format=kv_format, **wide)
    large = Pages(device, dtype, num_blocks=6, block_size=64)
    table = cos_sin_table(400, 64, 1e4, device=device)
    sizes: dict[str, Any] = dict(heads=64, dim=512, window=128, window_block=128, cos_sin=table)
    yield "production", call(large, [2, 1], [300, 131], ratio=2, topk=64, **sizes)
    records: dict[str, Any] = dict(window_format="v41_fp8_528", kv_format="v41_fp4_288")
    yield "production, records", call(large, [1], [300], ratio=2, topk=64, **sizes, **records)
