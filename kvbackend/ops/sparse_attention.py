"""Attention over chosen tokens of a paged K/V cache, its first ones and its last ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..arrays import Float, Float32, Index, Int32, Rows
from ..spec import op
from . import _checks, _formats, _math, _selecting
from ._samples import BATCHES, Pool

FORMATS = ("int8", "fp8_e4m3", "fp8_e4m3:head", "fp4_e2m1", "mxfp4", "nvfp4", "fp4_e2m1/int8")


@op(group="sparse attention")
def sparse_attention(
    q: Float[Tensor, "T H D"],
    key_cache: Rows[Tensor, "nb bs Hk key_width"],
    value_cache: Rows[Tensor, "nb bs Hk value_width"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    topk_indices: Index[Tensor, "T Hk topk"],
    softmax_scale: float,
    page_size: int = 1,
    num_sinks: int = 0,
    num_recent: int = 0,
    softcap: float = 0.0,
    sinks: Float[Tensor, "H"] | None = None,
    k_scale: Float32[Tensor, "*k_scale"] | None = None,
    v_scale: Float32[Tensor, "*v_scale"] | None = None,
    k_scale_cache: Rows[Tensor, "nb *k_scales"] | None = None,
    v_scale_cache: Rows[Tensor, "nb *v_scales"] | None = None,
    kv_format: str = "auto",
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend to the tokens that each kv head chose for a query, to the first num_sinks, to the last, and to no others.

    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, softcap, sinks,
    k_scale, v_scale, k_scale_cache, v_scale_cache, kv_format   as in paged_attention; causal
    topk_indices     [T, Hk, topk] positions within the query's sequence, in any order; -1 is none. What is among the
                     first or the last tokens counts there alone; one that is named twice counts twice
    page_size, num_sinks, num_recent   which tokens are attended to in any case, as page_logits leaves them out: the
                     first num_sinks, the last num_recent, and what else of the first page of page_size tokens of these.
                     With num_recent 0 there are no last ones but those of an open page
    Returns out [T, H, Dv] in q's dtype, and lse [T, H] float32, natural log, without the sinks; empty unless
    return_lse. A query with nothing to attend to gives out 0 and lse -inf.
    Undefined on accelerators: blocks that the cache lacks (the CPU kernel takes them as no block).
    Source: Quest (arXiv 2406.10774); first and last tokens as in StreamingLLM (arXiv 2309.17453).
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    num_tokens, kv_heads = q.shape[0], key_cache.shape[2]
    keys, values = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    if 0 in (num_tokens, seq_lens.shape[0], block_table.shape[1], key_cache.shape[1]) or max_seqlen_q <= 0:
        return _math.nothing_seen(q, values.width(), return_lse)
    dtype, outs, lses = _math.compute_dtype(q), [], []
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        table = block_table[sequence.index]
        (k, exists), (v, _) = (side.gather(table, sequence.length, dtype) for side in (keys, values))  # [S, Hk, D], [S]
        own = sequence.positions[:, None, None]
        end = _selecting.middle_end(own, num_recent, page_size)
        every = torch.arange(len(exists), device=q.device).expand(len(own), kv_heads, -1)  # [n, Hk, S]
        chosen = topk_indices[sequence.tokens].long()
        token = torch.cat((every, chosen), -1)  # [n, Hk, S + topk]
        middle = (token >= num_sinks) & (token < end)
        allowed = torch.cat((~middle[..., : len(exists)], middle[..., len(exists) :]), -1) & (token <= own)
        token = token.masked_fill(~allowed, 0)
        allowed = allowed & exists[token]
        by_head, lse_by_head = [], []
        for head, queries in enumerate(q[sequence.tokens].to(dtype).unflatten(1, (kv_heads, -1)).unbind(1)):
            row = token[:, head]  # [n, J]
            logits = torch.einsum("ngd,njd->ngj", queries, k[row, head]) * softmax_scale
            if softcap > 0:
                logits = softcap * torch.tanh(logits / softcap)
            masked = ~allowed[:, head, None]
            lse = logits.masked_fill(masked, -torch.inf).logsumexp(-1)  # [n, G]
            weights = _math.probabilities(logits, lse[..., None], masked)
            values_of = v[row, head].masked_fill(~allowed[:, head, :, None], 0)  # 0 * NaN is NaN
            by_head.append(torch.einsum("ngj,njd->ngd", weights, values_of))
            lse_by_head.append(lse)
        out, lse = torch.cat(by_head, 1), torch.cat(lse_by_head, 1)  # [n, H, Dv], [n, H]
        outs.append(out if sinks is None else _math.apply_sinks(out, lse, sinks))
        lses.append(lse)
    out = _math.unpad(outs, cu_seqlens_q, num_tokens, 0.0).to(q.dtype)
    if not return_lse:
        return out, q.new_empty(0, dtype=torch.float32)
    return out, _math.unpad(lses, cu_seqlens_q, num_tokens, -torch.inf).float()


@sparse_attention.check
def _(
    q, key_cache, value_cache, page_size, num_sinks, num_recent, softcap, k_scale, v_scale, k_scale_cache,
    v_scale_cache, kv_format, **_,
):  # fmt: skip
    keys, values = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    keys.check("q", q, q.shape[2])
    values.check("q", q)
    _checks.heads_divide(q.shape[1], key_cache.shape[2])
    _checks.softcap(softcap)
    _selecting.check_middle(page_size, num_sinks, num_recent)


@sparse_attention.values
def _(q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, **_):
    _checks.batch(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], key_cache)


@sparse_attention.fake
def _(q, value_cache, kv_format, return_lse, **_):
    value_dim = _formats.values(value_cache, kv_format).width()
    return (
        q.new_empty(*q.shape[:2], value_dim),
        q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32),
    )


@sparse_attention.samples
def _(device, dtype):
    def call(
        pool: Pool, q_lens: list[int], seq_lens: list[int], group: int = 3, topk: int = 5, kv_format: str = "auto",
        **other: Any,
    ) -> dict[str, Any]:  # fmt: skip
        batch, tables = pool.batch(q_lens, seq_lens)
        cached: dict[str, Any]
        if kv_format == "auto":
            cached = dict(zip(("key_cache", "value_cache"), pool.caches(), strict=True))
            for cache in cached.values():
                pool.fill(cache, tables, seq_lens)
        else:
            shape = pool.num_blocks, pool.block_size, pool.kv_heads, pool.head_dim
            cached = dict(kv_format=kv_format)
            for side, name in zip(("key", "value"), formats.pair(kv_format), strict=True):
                codes = pool.codes(name, shape, side)
                scales = {f"{side[0]}_{which}": codes[which] for which in ("scale", "scale_cache")}
                cached |= {f"{side}_cache": codes["cache"], **scales}
        q = pool.randn(sum(q_lens), pool.kv_heads * group, pool.head_dim)
        drawn = torch.randint(-1, 31, (sum(q_lens), pool.kv_heads, topk), generator=pool.generator)
        common = dict(topk_indices=drawn.int().to(device), softmax_scale=pool.head_dim**-0.5, return_lse=True)
        return dict(q=q, **cached, **batch, **common, page_size=3, num_sinks=2, num_recent=4) | other

    for name, q_lens, seq_lens in BATCHES:
        yield name, call(Pool(device, dtype, num_blocks=12), q_lens, seq_lens)
    for name, pool in Pool.variants(device, dtype):
        yield name, call(pool, [3, 1], [19, 30], group=4 if name == "production" else 2)
    pool = Pool(device, dtype)
    mixed = [3, 4], [20, 27]
    yield "MHA", call(pool, *mixed, group=1)
    yield "eleven heads of one", call(pool, *mixed, group=11)
    yield "chosen tokens only", call(pool, *mixed, num_sinks=0, num_recent=0, page_size=1)
    yield "only an open page", call(pool, *mixed, num_sinks=0, num_recent=0, topk=0)
    yield "all in any case", call(pool, *mixed, num_sinks=9, num_recent=20, page_size=16)
    yield "softcap", call(pool, *mixed, softcap=2.0, softmax_scale=1.5)
    yield "sinks", call(pool, *mixed, sinks=pool.randn(6))
    yield "no lse", call(pool, *mixed, return_lse=False)
    padded = call(pool, *mixed)
    yield "positions past all", padded | dict(topk_indices=torch.full_like(padded["topk_indices"], 1 << 30))
    yield "positions in int64", padded | dict(topk_indices=padded["topk_indices"].long())
    yield "strided positions", padded | dict(topk_indices=padded["topk_indices"].mT.contiguous().mT)
    extra = pool.randn(2, 6, pool.head_dim), padded["topk_indices"][:2]
    longer = {name: torch.cat((padded[name], more)) for name, more in zip(("q", "topk_indices"), extra, strict=True)}
    yield "rows past the batch", padded | longer
    holes = padded["block_table"].long()
    holes[:, 0] = -1
    yield "freed first block, int64 table", padded | dict(block_table=holes)
    wide = pool.randn(7, 6, 3 * pool.head_dim)
    yield "sliced q", padded | dict(q=wide[..., pool.head_dim : 2 * pool.head_dim])
    for kv_format in FORMATS:
        large = Pool(device, dtype, block_size=16, head_dim=64)
        yield kv_format, call(large, [2, 1], [60, 33], kv_format=kv_format, softmax_scale=1e-3)  # codes are large
