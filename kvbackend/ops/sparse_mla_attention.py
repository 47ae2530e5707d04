"""Absorbed MLA over chosen tokens of a paged latent cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float, Index, Int32, Rows, need
from ..spec import op
from . import _checks, _math, _pages
from ._samples import BATCHES, Pool

_ROWS = 1 << 15  # cached rows that the reference holds at a time


@op(group="sparse attention")
def sparse_mla_attention(
    q_nope: Float[Tensor, "T H kv_lora_rank"],
    q_pe: Float[Tensor, "T H qk_rope_head_dim"],
    ckv_cache: Rows[Tensor, "nb *page"],
    kpe_cache: Float[Tensor, "nb bs qk_rope_head_dim"] | None,
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    topk_indices: Int32[Tensor, "T topk"],
    softmax_scale: float,
    causal: bool = True,
    kv_format: str = "auto",
    block_size: int = -1,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend in MLA's latent space to the tokens that were selected for each query, and to no others.

    q_nope, q_pe     [T, H, kv_lora_rank] with W_UK absorbed, and [T, H, qk_rope_head_dim], as in mla_attention
    ckv_cache, kpe_cache   [nb, bs, kv_lora_rank | qk_rope_head_dim] in q's dtype, any strides; or uint8 pages of a
                     record [nb, page_bytes] and None: a record holds both parts
    block_table, seq_lens, cu_seqlens_q, max_seqlen_q   as in paged_attention
    topk_indices     [T, topk] int32 positions within the query's sequence, in any order, as lightning_indexer returns
                     them; outside [0, seq_len) means no token, -1 among them. One that is named twice counts twice
    softmax_scale    as in mla_attention
    causal           a position past the query's own is no token
    kv_format        "auto", or the record that ckv_cache's pages hold: v32_fp8_656, v32_fp8_656_ascend, ...
    block_size       rows of a page of records; -1: as many as fit
    Returns out [T, H, kv_lora_rank] in q_nope's dtype, and lse [T, H] float32, natural log, empty unless return_lse. A
    query with nothing to attend to gives out 0 and lse -inf.
    Undefined on accelerators: blocks that the cache lacks (the CPU kernel takes them as no block).
    Source: DeepSeek-V3.2-Exp, section 2.1; FlashMLA flash_mla_sparse_fwd, whose lse of an empty row is +inf.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    num_tokens, num_heads, rank = q_nope.shape
    dtype, topk = _math.compute_dtype(q_nope), topk_indices.shape[1]
    out = q_nope.new_zeros(q_nope.shape, dtype=dtype)
    lse = q_nope.new_full((num_tokens, num_heads), -torch.inf, dtype=dtype)
    if 0 not in (num_tokens, topk, *block_table.shape, ckv_cache.shape[0]) and max_seqlen_q > 0:
        q = torch.cat((q_nope, q_pe), -1).to(dtype)
        sequence, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
        last = own if causal else torch.where(own >= 0, seq_lens[sequence].long() - 1, -1)
        step = max(_ROWS // topk, 1)
        for first in range(0, num_tokens, step):
            part = slice(first, first + step)
            rows, exists = _selected(
                topk_indices[part].long(), last[part], block_table[sequence[part]], ckv_cache, kpe_cache, kv_format,
                block_size, dtype,
            )  # fmt: skip
            out[part], lse[part] = _attend(q[part], rows, exists, rank, softmax_scale)
    return out.to(q_nope.dtype), lse.float() if return_lse else q_nope.new_empty(0, dtype=torch.float32)


def _selected(
    position: Tensor, last: Tensor, block_table: Tensor, ckv_cache: Tensor, kpe_cache: Tensor | None, kv_format: str,
    block_size: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows [n, topk, kv_lora_rank + qk_rope_head_dim] of positions [n, topk] up to last [n], and which exist."""
    size = _pages.block_size_of(ckv_cache, kv_format, block_size)
    column = position // size
    exists = (position >= 0) & (position <= last[:, None]) & (column < block_table.shape[1])
    block = block_table.gather(1, column.masked_fill(~exists, 0)).long()
    exists = exists & (block >= 0)
    slot = torch.where(exists, block * size + position % size, 0).flatten()
    rows = _pages.rows_at(ckv_cache, kv_format, slot, dtype, block_size)
    if kpe_cache is not None:
        rows = torch.cat((rows, _pages.rows_at(kpe_cache, "auto", slot, dtype)), -1)
    return rows.unflatten(0, position.shape).masked_fill(~exists[..., None], 0), exists


def _attend(q: Tensor, rows: Tensor, exists: Tensor, rank: int, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Each query [n, H, D] over rows of its own [n, topk, D], whose first `rank` numbers are the values."""
    logits = (q @ rows.mT) * softmax_scale  # [n, H, topk]
    masked = ~exists[:, None]
    lse = logits.masked_fill(masked, -torch.inf).logsumexp(-1)
    return _math.probabilities(logits, lse[..., None], masked) @ rows[..., :rank], lse


@sparse_mla_attention.check
def _(q_nope, q_pe, ckv_cache, kpe_cache, kv_format, block_size, **_):
    _checks.same_dtype("q_nope", q_nope, q_pe=q_pe)
    split = kv_format == "auto"
    need(
        (kpe_cache is None) != split,
        f"kpe_cache is {'None' if split else 'given'} with kv_format {kv_format!r}; a record holds the rotary part, "
        f"'auto' has it in a tensor of its own: {'pass kpe_cache' if split else 'pass None'}",
    )
    if split:
        _pages.check_pages("ckv_cache", ckv_cache, kv_format, "q_nope", q_nope, ("mla",))
        _checks.same_dtype("q_nope", q_nope, kpe_cache=kpe_cache)
        need(
            ckv_cache.shape[1] == kpe_cache.shape[1],
            f"ckv_cache has blocks of {ckv_cache.shape[1]} tokens and kpe_cache of {kpe_cache.shape[1]}; both must be "
            f"one pool: allocate them alike",
        )
        return
    _pages.check_records("ckv_cache", ckv_cache, kv_format, ("mla",), block_size)
    dims = formats.record(kv_format).dims
    need(
        dims == (q_nope.shape[2], q_pe.shape[2]),
        f"q_nope and q_pe have {q_nope.shape[2]} and {q_pe.shape[2]} dims; rows of {kv_format!r} have {dims[0]} and "
        f"{dims[1]}: pass queries of that model",
    )


@sparse_mla_attention.values
def _(
    q_nope, ckv_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, kv_format, block_size, **_
):  # fmt: skip
    rows = _pages.block_size_of(ckv_cache, kv_format, block_size)
    num_blocks = ckv_cache.shape[0]
    _checks.paged_batch(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q_nope.shape[0], num_blocks, rows)
    _checks.within("topk_indices", topk_indices, -1, max(block_table.shape[1] * rows, 1), "position", "-1 is no token")


@sparse_mla_attention.fake
def _(q_nope, return_lse, **_):
    num_tokens, num_heads, _ = q_nope.shape
    return (
        q_nope.new_empty(q_nope.shape),
        q_nope.new_empty((num_tokens, num_heads) if return_lse else (0,), dtype=torch.float32),
    )


@sparse_mla_attention.samples
def _(device, dtype):
    def call(
        pool: Pool, q_lens: list[int], seq_lens: list[int], topk: int = 6, heads: int = 3, rank: int = 32,
        rope: int = 8, fused: bool = False, kv_format: str = "auto", **other: Any,
    ) -> dict[str, Any]:  # fmt: skip
        batch, tables = pool.batch(q_lens, seq_lens)
        caches: dict[str, Any]
        if kv_format == "auto":
            pages = torch.full((pool.num_blocks, pool.block_size, rank + rope), torch.nan, dtype=dtype, device=device)
            pool.fill(pages, tables, seq_lens)
            parts = pages[..., :rank], pages[..., rank:]
            caches = dict(
                zip(("ckv_cache", "kpe_cache"), parts if fused else map(Tensor.contiguous, parts), strict=True)
            )
        else:
            page_bytes = formats.record(kv_format).page_bytes(pool.block_size)
            pages = torch.full((pool.num_blocks, page_bytes), 255, dtype=torch.uint8, device=device)
            for table, length in zip(tables, seq_lens, strict=True):
                slots = [table[i // pool.block_size] * pool.block_size + i % pool.block_size for i in range(length)]
                _pages.write(pages, kv_format, pool.ints(slots), pool.randn(length, rank + rope))
            caches = dict(ckv_cache=pages, kpe_cache=None, kv_format=kv_format)
        num_tokens = sum(q_lens)
        queries = dict(q_nope=pool.randn(num_tokens, heads, rank), q_pe=pool.randn(num_tokens, heads, rope))
        chosen = []  # some positions that a query sees, in no order, and -1 for the rest
        for q_len, length in zip(q_lens, seq_lens, strict=True):
            for query in range(q_len):
                seen = pool.permutation(max(length - q_len + query + 1, 0)).tolist()[:topk]
                chosen.append(seen + [-1] * (topk - len(seen)))
        indices = pool.ints(chosen).reshape(num_tokens, topk)
        return {
            **queries,
            **caches,
            **batch,
            "topk_indices": indices,
            "softmax_scale": 0.15,
            "return_lse": True,
            **other,
        }

    for name, q_lens, seq_lens in BATCHES:
        yield name, call(Pool(device, dtype, num_blocks=12), q_lens, seq_lens)
    for block_size, num_blocks in ((1, 60), (16, 6), (61, 3)):
        pool = Pool(device, dtype, num_blocks=num_blocks, block_size=block_size)
        yield f"block {block_size}", call(pool, [3, 1], [19, 30])
    pool = Pool(device, dtype)
    mixed = [1, 4], [9, 7]
    yield "fused cache", call(pool, *mixed, fused=True)
    yield "one head, odd dims", call(pool, *mixed, heads=1, rank=7, rope=2)
    yield "many heads", call(pool, *mixed, heads=40)
    yield "no lse", call(pool, *mixed, return_lse=False)
    yield "k of 1", call(pool, *mixed, topk=1)
    yield "k of 0", call(pool, *mixed, topk=0)
    yield "more than there are", call(pool, *mixed, topk=70)
    plain = call(pool, *mixed)
    chosen = [[-1, 3, -1, 0, -1], [-1] * 5, [0, 1, 2, 3, 4], [6, 5, 4, 3, 2], [2, 2, 2, -1, 6]]
    yield "gaps, an empty row, future positions, one twice", plain | dict(topk_indices=pool.ints(chosen))
    yield "not causal", plain | dict(topk_indices=pool.ints(chosen), causal=False)
    yield "strided indices", plain | dict(topk_indices=pool.ints(chosen).T.contiguous().T[:, ::2])
    yield "transposed q", plain | dict(q_nope=pool.randn(3, 5, 32).transpose(0, 1))
    rows = dict(q_nope=torch.cat((plain["q_nope"], pool.randn(2, 3, 32))), q_pe=pool.randn(7, 3, 8))
    yield "rows past the batch", plain | rows | dict(topk_indices=pool.ints([[0, 1]] * 7))
    holes = plain["block_table"].long()
    holes[:, 0] = -1
    yield "freed first block, int64 table", plain | dict(block_table=holes)
    yield "large logits", plain | dict(softmax_scale=100.0)
    for name in MLA_RECORDS:
        yield (
            name,
            call(Pool(device, dtype, block_size=16, num_blocks=4), [2, 1], [30, 9], 7, 3, 512, 64, kv_format=name),
        )
    production = Pool(device, dtype, num_blocks=4, block_size=64)
    yield "production", call(production, [2, 1], [19, 150], topk=64, heads=16, rank=512, rope=64, fused=True)
    for heads, kv_format in ((64, "v32_fp8_656"), (64, "auto"), (128, "auto")):
        pool = Pool(device, dtype, num_blocks=8, block_size=16)
        sizes: dict[str, Any] = dict(topk=37, heads=heads, rank=512, rope=64, softmax_scale=0.07)
        yield f"{heads} heads, {kv_format}", call(pool, [1, 5], [19, 40], kv_format=kv_format, **sizes)


MLA_RECORDS = [name for name in formats.record_names() if formats.record(name).holds == "mla"]
