"""The lightning indexer's scores of a paged cache of index keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import Float, FloatOrE4m3, Index, Int32, Rows, need
from ..spec import op
from . import _checks, _math, _pages, _selecting
from ._samples import IndexPool


@op(group="selecting")
def indexer_logits(
    q: FloatOrE4m3[Tensor, "T Hi Di"],
    weights: Float[Tensor, "T Hi"],
    key_cache: Rows[Tensor, "nb *page"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    compress_ratio: int = 1,
    kv_format: str = "auto",
    block_size: int = -1,
) -> Tensor:
    """Score every index key that a query sees: I[t, j] = sum over heads h of weights[t, h] * relu(q[t, h] . key[j]).

    q                [T, Hi, Di], RoPE applied; any strides. Where a model quantizes it, pass the numbers it reads as,
                     or over records its codes in float8_e4m3fn, with their scale in the weights
    weights          [T, Hi] float32 or another float dtype, with the factors Hi ** -0.5 and Di ** -0.5 of the model in
                     them (and q's scale, if it has one); they may be negative
    key_cache        [nb, bs, Di] in q's dtype, any strides, or uint8 [nb, page_bytes] of a record of index keys
    block_table      [B, max_blocks] blocks of each sequence's keys; entries past its keys are not looked at, -1 is none
    seq_lens, cu_seqlens_q, max_seqlen_q   the batch, in tokens, as in paged_attention
    compress_ratio   tokens that share one key: a sequence has seq_lens // compress_ratio keys, and a query at position
                     p sees the first (p + 1) // compress_ratio of them
    kv_format        "auto", or the record that the pages hold: index_fp8_132, index_mxfp4_68, ... (`kvbackend.formats`)
    block_size       rows of a page of records; -1: as many as fit
    Returns scores [T, max_blocks * bs] float32: column j is key j of the query's own sequence; -inf where there is no
    such key, or the query does not see it. Cut block_table to what is in use to have fewer columns.

    A NaN in a visible key, a query or its weights makes its scores NaN, which the selecting ops never select.
    Undefined on accelerators: blocks that the cache lacks (the CPU kernel takes them as no block).
    Source: DeepSeek-V3.2-Exp, section 2.1; DeepGEMM fp8_paged_mqa_logits; compress_ratio as in DeepSeek-V4 and V4.1.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    if q.dtype is torch.float8_e4m3fn:
        q = q.float()  # exact
    keys = _selecting.IndexKeys(key_cache, kv_format, block_size, compress_ratio)
    num_tokens, width = q.shape[0], block_table.shape[1] * keys.block_size
    if 0 in (num_tokens, width, seq_lens.shape[0]) or max_seqlen_q <= 0:
        return q.new_full((num_tokens, width), -torch.inf, dtype=torch.float32)
    rows = []
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        tiles = keys.score_tiles(q, weights, block_table[sequence.index], sequence)
        rows.append(torch.cat([scores for _, scores in tiles], 1))
    return _math.unpad(rows, cu_seqlens_q, num_tokens, -torch.inf).float()


@indexer_logits.check
def _(q, key_cache, kv_format, block_size, compress_ratio, **_):
    _selecting.check_keys(q, key_cache, kv_format, block_size, compress_ratio)
    need(
        q.dtype is not torch.float8_e4m3fn or kv_format != "auto",
        "q is torch.float8_e4m3fn with kv_format 'auto'; codes of queries score keys of a record, which has their "
        "scales: name the record, or convert q",
    )


@indexer_logits.values
def _(q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, kv_format, block_size, compress_ratio, **_):
    rows = _pages.block_size_of(key_cache, kv_format, block_size)
    _checks.paged_batch(
        block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], key_cache.shape[0], rows, compress_ratio
    )


@indexer_logits.fake
def _(q, key_cache, block_table, kv_format, block_size, **_):
    width = block_table.shape[1] * _pages.block_size_of(key_cache, kv_format, block_size)
    return q.new_empty(q.shape[0], width, dtype=torch.float32)


@indexer_logits.samples
def _(device, dtype):
    yield from _selecting.samples(device, dtype, {})
    pool = IndexPool(device, dtype, num_blocks=8, block_size=64, heads=64, dim=128, kv_format="index_fp8_132")
    for name, q_lens, seq_lens in (("decode", [1, 1], [150, 19]), ("prefill", [30, 2], [130, 9])):
        call = pool.call(q_lens, seq_lens)
        yield f"fp8 queries, {name}", call | dict(q=call["q"].to(torch.float8_e4m3fn), weights=call["weights"].float())
