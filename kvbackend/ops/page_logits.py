"""How large the logits of a page of tokens can be: by what dynamic sparsity finds the pages worth a look."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Index, Int32
from ..spec import op
from . import _checks, _math, _selecting
from ._samples import BATCHES, Pool


@op(group="selecting")
def page_logits(
    q: Float[Tensor, "T H D"],
    low_cache: Float[Tensor, "nb bs Hk D"],
    high_cache: Float[Tensor, "nb bs Hk D"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    page_size: int,
    num_sinks: int = 0,
    num_recent: int = 0,
) -> Tensor:
    """Bound the logits of every page of tokens by the smallest and the largest number of each channel of its keys.

    For a query t, kv head k and page m of page_size neighbouring tokens,

        L[t, k, m] = max over the query heads h of k  sum over channels d of  max(q[d] * low[d], q[d] * high[d])

    with q = q[t, h], low = low of page m and head k, and high likewise. No logit q . key inside the page is above it.

    q                     [T, H, D]; any strides
    low_cache, high_cache [nb, bs, Hk, D] in q's dtype, any strides: channel by channel the smallest and the largest
                          number among the keys of each page. A block holds bs pages, which are bs * page_size tokens
    block_table           [B, max_blocks] blocks of each sequence's pages; -1 is none
    seq_lens, cu_seqlens_q, max_seqlen_q   the batch, in tokens, as in paged_attention
    page_size             tokens of a page; it need not match the block size of the keys' own cache
    num_sinks, num_recent first and last tokens that the query attends to in any case, the query itself among the last.
                          A page is scored if it holds a token past the first num_sinks and none of the last
                          num_recent; so the page that a query stands in is scored with num_recent 0 only, and only
                          where it is whole
    Returns [T, Hk, max_blocks * bs] float32: column m is page m of the query's own sequence; -inf where it is not
    scored.

    NaN in a query, or in both bounds of a channel as a NaN key makes them, makes the scores NaN, which topk_indices
    never selects; in one bound alone it may. Infinite bounds make them infinite or NaN.
    Undefined on accelerators: blocks that the caches lack (the CPU kernel takes them as no block).
    Source: Quest (arXiv 2406.10774), section 3.3; the largest of a kv head's query heads is our choice for GQA.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    num_tokens, kv_heads, width = q.shape[0], low_cache.shape[2], block_table.shape[1] * low_cache.shape[1]
    if 0 in (*q.shape[:2], width, seq_lens.shape[0]) or max_seqlen_q <= 0:
        return q.new_full((num_tokens, kv_heads, width), -torch.inf, dtype=torch.float32)
    dtype, rows = _math.compute_dtype(q), []
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        table = block_table[sequence.index]
        pages = torch.div(sequence.length + page_size - 1, page_size, rounding_mode="floor")
        (low, exists), (high, _) = (_math.gather_rows(cache, table, pages) for cache in (low_cache, high_cache))
        queries = q[sequence.tokens].to(dtype).unflatten(1, (kv_heads, -1))  # [n, Hk, G, D]
        bounds = torch.einsum("nkgd,mkd->nkgm", queries.clamp(min=0), high.to(dtype))
        bounds = bounds + torch.einsum("nkgd,mkd->nkgm", queries.clamp(max=0), low.to(dtype))
        first = torch.arange(len(exists), device=q.device) * page_size
        end = _selecting.middle_end(sequence.positions, num_recent, page_size)
        scored = exists & (first < end[:, None]) & (first + page_size > num_sinks)  # [n, pages]
        rows.append(bounds.amax(2).masked_fill(~scored[:, None], -torch.inf))
    return _math.unpad(rows, cu_seqlens_q, num_tokens, -torch.inf).float()


@page_logits.check
def _(q, low_cache, high_cache, page_size, num_sinks, num_recent, **_):
    _checks.same_dtype("q", q, low_cache=low_cache, high_cache=high_cache)
    _checks.heads_divide(q.shape[1], low_cache.shape[2], "low_cache")
    _selecting.check_middle(page_size, num_sinks, num_recent)


@page_logits.values
def _(q, low_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, page_size, **_):
    num_blocks, block_size = low_cache.shape[:2]
    pages = -(-seq_lens // page_size)
    capacity = block_table.shape[1] * block_size * page_size
    _checks.within("seq_lens", seq_lens, 0, capacity + 1, "length", f"block_table covers {capacity} tokens")
    _checks.queries(seq_lens, cu_seqlens_q, q.shape[0], max_seqlen_q)
    _checks.blocks_in_use("block_table", block_table, pages, num_blocks, block_size)


@page_logits.fake
def _(q, low_cache, block_table, **_):
    width = block_table.shape[1] * low_cache.shape[1]
    return q.new_empty(q.shape[0], low_cache.shape[2], width, dtype=torch.float32)


@page_logits.samples
def _(device, dtype):
    def call(
        pool: Pool, q_lens: list[int], seq_lens: list[int], page_size: int = 3, group: int = 3, **other: Any
    ) -> dict[str, Any]:
        pages = [-(-length // page_size) for length in seq_lens]
        batch, tables = pool.batch(q_lens, pages)
        low_cache, high_cache = pool.caches()
        pool.fill(low_cache, tables, pages)
        high_cache.copy_(low_cache + pool.randn(*low_cache.shape).abs())
        q = pool.randn(sum(q_lens), pool.kv_heads * group, pool.head_dim)
        batch["seq_lens"] = pool.ints(seq_lens)
        return dict(q=q, low_cache=low_cache, high_cache=high_cache, **batch, page_size=page_size, **other)

    for name, q_lens, seq_lens in BATCHES:
        yield name, call(Pool(device, dtype, num_blocks=12), q_lens, seq_lens)
    for name, pool in Pool.variants(device, dtype):
        if pool.head_dim == pool.value_dim:
            yield name, call(pool, [3, 1], [50, 90], group=4 if name == "production" else 2)
    pool = Pool(device, dtype)
    mixed = [3, 4], [29, 60]
    yield "MHA", call(pool, *mixed, group=1)
    yield "eleven heads of one", call(pool, *mixed, group=11)
    yield "sinks and recent tokens", call(pool, *mixed, num_sinks=4, num_recent=7)
    yield "nothing between sinks and recent tokens", call(pool, *mixed, num_sinks=30, num_recent=40)
    yield "pages of one token", call(pool, [3, 1], [9, 20], page_size=1, num_recent=1)
    yield "a page of all", call(pool, *mixed, page_size=100)
    padded = call(pool, *mixed)
    yield "rows past the batch", padded | dict(q=torch.cat((padded["q"], pool.randn(2, 6, pool.head_dim))))
    holes = padded["block_table"].long()
    holes[:, 0] = -1
    yield "freed first block, int64 table", padded | dict(block_table=holes)
    wide = pool.randn(7, 6, 3 * pool.head_dim)
    yield "sliced q", padded | dict(q=wide[..., pool.head_dim : 2 * pool.head_dim])
    both = torch.cat((padded["low_cache"], padded["high_cache"]), -1)
    low_cache, high_cache = both.chunk(2, -1)
    yield "bounds side by side", padded | dict(low_cache=low_cache, high_cache=high_cache)
    spoiled = padded["high_cache"].clone()
    spoiled[:, 1, 0, 3] = torch.nan
    yield "NaN in some pages", padded | dict(high_cache=spoiled)
