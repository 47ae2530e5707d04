"""The logits of the tokens in some pages of each query's own: by what dynamic sparsity chooses among them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float, Float32, Index, Int32, Rows
from ..spec import op
from . import _checks, _formats, _math, _selecting
from ._samples import BATCHES, Pool


@op(group="selecting")
def token_logits(
    q: Float[Tensor, "T H D"],
    key_cache: Rows[Tensor, "nb bs Hk key_width"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    pages: Index[Tensor, "T Hk P"],
    page_size: int,
    num_sinks: int = 0,
    num_recent: int = 0,
    k_scale: Float32[Tensor, "*k_scale"] | None = None,
    k_scale_cache: Rows[Tensor, "nb *k_scales"] | None = None,
    kv_format: str = "auto",
) -> Tensor:
    """Score the tokens of chosen pages: the largest logit, not scaled, of the query heads of each kv head.

    q                     [T, H, D]; any strides
    key_cache             [nb, bs, Hk, D], any strides, q's dtype; a quantized kv_format stores codes
    block_table, seq_lens, cu_seqlens_q, max_seqlen_q   the batch, as in paged_attention
    pages                 [T, Hk, P] pages that each query's kv heads look at, such as topk_indices finds among
                          page_logits; a page outside the sequence, -1 among them, is none
    page_size             tokens of a page: page m is the tokens from m * page_size on, whatever bs is
    num_sinks, num_recent first and last tokens of a query that are not scored, as in page_logits: neither those, nor
                          what else their first page holds
    k_scale, k_scale_cache, kv_format   as in paged_attention; a kv_format of two names gives the keys' first
    Returns [T, Hk, P * page_size] float32: column j is token pages[.., j // page_size] * page_size + j % page_size;
    -inf where there is none, or it is not scored.

    NaN in a query or key makes its scores NaN, which topk_indices never selects.
    Undefined on accelerators: blocks that the cache lacks (the CPU kernel takes them as no block).
    Source: Quest (arXiv 2406.10774) for the pages, which it takes whole; looking at their tokens is our own.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    num_tokens, kv_heads, width = q.shape[0], key_cache.shape[2], pages.shape[2] * page_size
    if 0 in (*q.shape[:2], width, seq_lens.shape[0], block_table.shape[1], key_cache.shape[1]) or max_seqlen_q <= 0:
        return q.new_full((num_tokens, kv_heads, width), -torch.inf, dtype=torch.float32)
    keys, dtype, rows = _formats.keys(key_cache, kv_format, k_scale, k_scale_cache), _math.compute_dtype(q), []
    offset = torch.arange(page_size, device=q.device)
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        k, exists = keys.gather(block_table[sequence.index], sequence.length, dtype)  # [rows, Hk, D], [rows]
        page = pages[sequence.tokens].long().clamp(-1, len(exists) // page_size)
        token = (page[..., None] * page_size + offset).flatten(2)  # [n, Hk, P * page_size]
        end = _selecting.middle_end(sequence.positions, num_recent, page_size)[:, None, None]
        scored = (token >= num_sinks) & (token < end) & (token >= 0)
        token = token.masked_fill(~scored, 0).clamp(max=len(exists) - 1)
        head = torch.arange(kv_heads, device=q.device)[:, None]
        queries = q[sequence.tokens].to(dtype).unflatten(1, (kv_heads, -1))  # [n, Hk, G, D]
        scores = torch.einsum("nkgd,nkjd->nkgj", queries, k[token, head]).amax(2)
        rows.append(scores.masked_fill(~(scored & exists[token]), -torch.inf))
    return _math.unpad(rows, cu_seqlens_q, num_tokens, -torch.inf).float()


@token_logits.check
def _(q, key_cache, page_size, num_sinks, num_recent, k_scale, k_scale_cache, kv_format, **_):
    _formats.keys(key_cache, kv_format, k_scale, k_scale_cache).check("q", q, q.shape[2])
    _checks.heads_divide(q.shape[1], key_cache.shape[2])
    _selecting.check_middle(page_size, num_sinks, num_recent)


@token_logits.values
def _(q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, **_):
    _checks.batch(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], key_cache)


@token_logits.fake
def _(q, key_cache, pages, page_size, **_):
    return q.new_empty(q.shape[0], key_cache.shape[2], pages.shape[2] * page_size, dtype=torch.float32)


@token_logits.samples
def _(device, dtype):
    def call(
        pool: Pool, q_lens: list[int], seq_lens: list[int], page_size: int = 3, group: int = 3, count: int = 4,
        kv_format: str = "auto", **other: Any,
    ) -> dict[str, Any]:  # fmt: skip
        batch, tables = pool.batch(q_lens, seq_lens)
        cached: dict[str, Any]
        if kv_format == "auto":
            cached = dict(key_cache=pool.caches()[0])
            pool.fill(cached["key_cache"], tables, seq_lens)
        else:
            shape = pool.num_blocks, pool.block_size, pool.kv_heads, pool.head_dim
            codes = pool.codes(formats.pair(kv_format)[0], shape)
            cached = dict(key_cache=codes["cache"], k_scale=codes["scale"], k_scale_cache=codes["scale_cache"])
            cached |= dict(kv_format=kv_format)
        q = pool.randn(sum(q_lens), pool.kv_heads * group, pool.head_dim)
        drawn = torch.randint(-1, 9, (sum(q_lens), pool.kv_heads, count), generator=pool.generator)
        return dict(q=q, **cached, **batch, pages=drawn.int().to(device), page_size=page_size, **other)

    for name, q_lens, seq_lens in BATCHES:
        yield name, call(Pool(device, dtype, num_blocks=12), q_lens, seq_lens)
    for name, pool in Pool.variants(device, dtype):
        yield name, call(pool, [3, 1], [19, 30], group=4 if name == "production" else 2)
    pool = Pool(device, dtype)
    mixed = [3, 4], [20, 27]
    yield "MHA", call(pool, *mixed, group=1)
    yield "eleven heads of one", call(pool, *mixed, group=11)
    yield "sinks and recent tokens", call(pool, *mixed, num_sinks=4, num_recent=7)
    yield "pages of one token", call(pool, *mixed, page_size=1, num_recent=1)
    yield "pages of sixteen", call(pool, *mixed, page_size=16, num_recent=1)
    yield "no pages", call(pool, *mixed, count=0)
    padded = call(pool, *mixed)
    yield "pages past all", padded | dict(pages=torch.full_like(padded["pages"], 1 << 30))
    yield "pages in int64", padded | dict(pages=padded["pages"].long())
    yield "strided pages", padded | dict(pages=padded["pages"].transpose(1, 2).contiguous().transpose(1, 2))
    more = pool.randn(2, 6, pool.head_dim), padded["pages"][:2]
    yield (
        "rows past the batch",
        padded | dict(q=torch.cat((padded["q"], more[0])), pages=torch.cat((padded["pages"], more[1]))),
    )
    holes = padded["block_table"].long()
    holes[:, 0] = -1
    yield "freed first block, int64 table", padded | dict(block_table=holes)
    wide = pool.randn(7, 6, 3 * pool.head_dim)
    yield "sliced q", padded | dict(q=wide[..., pool.head_dim : 2 * pool.head_dim])
    for kv_format in ("int8", "fp8_e4m3", "fp8_e4m3:head", "fp4_e2m1", "mxfp4", "nvfp4", "fp4_e2m1/int8"):
        large = Pool(device, dtype, block_size=16, kv_heads=2, head_dim=64)
        yield kv_format, call(large, [2, 1], [60, 33], page_size=8, kv_format=kv_format)
