"""Dense attention over a paged K/V cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Float32, Index, Int32, Rows
from ..spec import op
from . import _checks, _formats, _math
from ._samples import BATCHES, Maker, Pool


@op(group="dense attention")
def paged_attention(
    q: Float[Tensor, "T H D"],
    key_cache: Rows[Tensor, "nb bs Hk key_width"],
    value_cache: Rows[Tensor, "nb bs Hk value_width"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    sinks: Float[Tensor, "H"] | None = None,
    k_scale: Float32[Tensor, "*k_scale"] | None = None,
    v_scale: Float32[Tensor, "*v_scale"] | None = None,
    k_scale_cache: Rows[Tensor, "nb *k_scales"] | None = None,
    v_scale_cache: Rows[Tensor, "nb *v_scales"] | None = None,
    kv_format: str = "auto",
    key_positions: Index[Tensor, "nb bs"] | None = None,
    rope_cos_sin: Float[Tensor, "P rotary_dim"] | None = None,
    rope_interleaved: bool = False,
    key_bias: Float32[Tensor, "nb bs Hk"] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend from the queries of a varlen batch to their sequences' cached keys and values (MHA, GQA or MQA).

    One call takes prefill, chunked prefill and decode together. The queries of a sequence are its last tokens: with
    n queries, query i stands at position seq_lens - n + i. Query head h reads kv head h // (H / Hk).

    q                [T, H, D]; any strides
    key_cache        [nb, bs, Hk, D], value_cache [nb, bs, Hk, Dv]; any strides, q's dtype. A quantized kv_format stores
                     codes, 4-bit ones two in a byte
    block_table      [B, max_blocks] blocks of each sequence; entries past seq_lens are never looked at, -1 is no block
    seq_lens         [B] tokens in the cache, the current ones included
    cu_seqlens_q     [B+1] running sum of the numbers of queries, from 0; rows of q past its end give 0
    max_seqlen_q     at least the largest number of queries
    softmax_scale    multiplies the logits (usually D ** -0.5)
    causal           a query sees keys at its own position and before
    window           a query at position p sees keys from p - window + 1 on; -1: no limit
    softcap          c > 0 turns logits s into c * tanh(s / c), after the scale and before the mask
    sinks            [H] logits that enter only the softmax denominator; neither scaled nor capped
    k_scale, v_scale, k_scale_cache, v_scale_cache, kv_format   as in reshape_and_cache. "int4" is read here too: key
                     scales [nb, bs / group, Hk, D, 2], value scales [nb, bs, Hk, Dv / group, 2]; seq_lens then counts
                     whole groups
    key_positions    [nb, bs] positions of cached tokens where they are not 0, 1, ... (after eviction). A query's own
                     position is that of its own row
    rope_cos_sin     [P, rotary_dim], cos then sin: rotate the first rotary_dim dims of each key at its position as it
                     is read, for caches of keys before RoPE; rope_interleaved as in apply_rope
    key_bias         [nb, bs, Hk] added to the logits after the cap (summary slots)
    Returns out [T, H, Dv] in q's dtype, and lse [T, H] float32, natural log, without the sinks; empty unless
    return_lse. A query with nothing to attend to gives out 0 and lse -inf.
    Undefined on accelerators: blocks that the cache lacks (the CPU kernel takes them as no block).
    Source: PagedAttention (arXiv 2309.06180); sinks as in gpt-oss; softcap as in Gemma 2.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    num_tokens = q.shape[0]
    keys, values = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    if num_tokens == 0 or seq_lens.shape[0] == 0 or max_seqlen_q <= 0:
        return _math.nothing_seen(q, values.width(), return_lse)
    dtype = _math.compute_dtype(q)
    outs, lses = [], []
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        table = block_table[sequence.index]
        k, exists = keys.gather(table, sequence.length, dtype)  # [S, Hk, D], [S]
        v, _ = values.gather(table, sequence.length, dtype)
        k_position = torch.arange(len(exists), device=q.device)
        q_position = sequence.positions
        if key_positions is not None:
            k_position, _ = _math.gather_rows(key_positions, table, sequence.length)
            own = k_position.long().gather(0, q_position.clamp(0, max(len(exists) - 1, 0)))
            q_position = torch.where(q_position < 0, -1, own)
        if rope_cos_sin is not None:
            half = rope_cos_sin.shape[-1] // 2
            angles = rope_cos_sin[k_position.long().clamp(0, rope_cos_sin.shape[0] - 1)].to(dtype)[:, None]  # over Hk
            turned = _math.rotate(k[..., : 2 * half], angles[..., :half], angles[..., half:], rope_interleaved)
            k = torch.cat((turned, k[..., 2 * half :]), -1)
        bias = None
        if key_bias is not None:
            bias = _math.gather_rows(key_bias, table, sequence.length)[0].to(dtype)
        allowed = exists[None] & (q_position >= 0)[:, None]  # [max_seqlen_q, S]
        if causal:
            allowed = allowed & (k_position[None] <= q_position[:, None])
        if window > 0:
            allowed = allowed & (k_position[None] > q_position[:, None] - window)
        out, lse = _math.attend(q[sequence.tokens].to(dtype), k, v, allowed, softmax_scale, softcap, bias)
        outs.append(out if sinks is None else _math.apply_sinks(out, lse, sinks))
        lses.append(lse)
    out = _math.unpad(outs, cu_seqlens_q, num_tokens, 0.0).to(q.dtype)
    if not return_lse:
        return out, q.new_empty(0, dtype=torch.float32)
    return out, _math.unpad(lses, cu_seqlens_q, num_tokens, -torch.inf).float()


@paged_attention.check
def _(
    q, key_cache, value_cache, window, softcap, sinks, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache,
    rope_cos_sin, **_,
):  # fmt: skip
    keys, values = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    keys.check("q", q, q.shape[2])
    values.check("q", q)
    _checks.heads_divide(q.shape[1], key_cache.shape[2])
    _checks.window(window)
    _checks.softcap(softcap)
    _checks.rope_at_read(rope_cos_sin, q)


@paged_attention.values
def _(q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, **_):
    _checks.batch(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], key_cache)


@paged_attention.fake
def _(q, value_cache, kv_format, return_lse, **_):
    num_tokens, num_heads, _ = q.shape
    value_dim = _formats.values(value_cache, kv_format).width()
    return (
        q.new_empty(num_tokens, num_heads, value_dim),
        q.new_empty((num_tokens, num_heads) if return_lse else (0,), dtype=torch.float32),
    )


@paged_attention.samples
def _(device, dtype):
    def call(pool: Pool, q_lens: list[int], seq_lens: list[int], group: int = 3, **other: Any) -> dict[str, Any]:
        key_cache, value_cache = pool.caches()
        batch, tables = pool.batch(q_lens, seq_lens)
        pool.fill(key_cache, tables, seq_lens)
        pool.fill(value_cache, tables, seq_lens)
        q = pool.randn(sum(q_lens), pool.kv_heads * group, pool.head_dim)
        caches = dict(q=q, key_cache=key_cache, value_cache=value_cache)
        return {**caches, **batch, "softmax_scale": pool.head_dim**-0.5, "return_lse": True, **other}

    for name, q_lens, seq_lens in BATCHES:
        yield name, call(Pool(device, dtype, num_blocks=12), q_lens, seq_lens)
    for name, pool in Pool.variants(device, dtype):
        yield name, call(pool, [3, 1], [19, 30], group=4 if name == "production" else 2)

    pool = Pool(device, dtype)
    mixed = [1, 4], [9, 7]
    yield "MHA", call(pool, *mixed, group=1)
    yield "window", call(pool, *mixed, window=3)
    yield "window of 1", call(pool, *mixed, window=1)
    yield "not causal", call(pool, *mixed, causal=False)
    yield "not causal, window", call(pool, *mixed, causal=False, window=2)
    yield "softcap", call(pool, *mixed, softcap=2.0, softmax_scale=1.5)
    yield "sinks", call(pool, *mixed, sinks=Maker(device, torch.float32).randn(6))
    yield "sinks without keys", call(pool, [1, 2], [0, 2], sinks=Maker(device, torch.float32).randn(6))
    yield "window, sinks, softcap", call(pool, *mixed, window=4, softcap=3.0, sinks=pool.randn(6))
    yield "no lse", call(pool, *mixed, return_lse=False)
    yield (
        "native format by name",
        call(pool, *mixed, kv_format={torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, "fp16")),
    )
    wide = pool.randn(5, 6, 3 * pool.head_dim)
    yield "sliced q", call(pool, *mixed, q=wide[..., pool.head_dim : 2 * pool.head_dim])
    yield "transposed q", call(pool, *mixed, q=pool.randn(6, 5, pool.head_dim).transpose(0, 1))
    yield "last dim strided q", call(pool, *mixed, q=pool.randn(5, pool.head_dim, 6).transpose(1, 2))
    padded = call(pool, *mixed)
    yield "rows past the batch", padded | dict(q=torch.cat((padded["q"], pool.randn(2, 6, pool.head_dim))))
    table = padded["block_table"]
    yield "int64 block table", padded | dict(block_table=table.long())
    yield "sliced block table", padded | dict(block_table=torch.stack((table, table), -1)[..., 0])
    holes = table.clone()
    holes[:, 0] = -1
    yield "freed first block", padded | dict(block_table=holes)
    yield "freed first block, window", padded | dict(block_table=holes, window=3)
    yield "large logits", call(pool, *mixed, softmax_scale=200.0)
    yield "equal logits", padded | dict(q=torch.zeros_like(padded["q"]))
    evicted = (torch.arange(pool.num_blocks * pool.block_size) * 3 % 37).view(pool.num_blocks, pool.block_size)
    in_order = evicted.sort(-1).values.to(device)
    yield "key positions", call(pool, [1, 1], [3, 4], key_positions=in_order, window=20)
    table = Maker(device, torch.float32).randn(40, 8)
    yield "rope at read", call(pool, *mixed, rope_cos_sin=table)
    yield "rope at read, interleaved", call(pool, *mixed, rope_cos_sin=table, rope_interleaved=True)
    bias = Maker(device, torch.float32).randn(pool.num_blocks, pool.block_size, pool.kv_heads)
    yield "key bias", call(pool, *mixed, key_bias=bias)
