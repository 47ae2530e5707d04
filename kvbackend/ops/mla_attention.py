"""Absorbed MLA over a paged latent cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Float32, Index, Int32, Rows
from ..spec import op
from . import _checks, _formats, _math
from ._samples import BATCHES, Pool


@op(group="dense attention")
def mla_attention(
    q_nope: Float[Tensor, "T H kv_lora_rank"],
    q_pe: Float[Tensor, "T H qk_rope_head_dim"],
    ckv_cache: Rows[Tensor, "nb bs latent_width"],
    kpe_cache: Float[Tensor, "nb bs qk_rope_head_dim"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = True,
    kv_format: str = "auto",
    k_scale: Float32[Tensor, "1"] | None = None,
    k_scale_cache: Rows[Tensor, "nb bs *k_scales"] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend in MLA's latent space: every head reads the one latent row of a token as key and as value.

    q_nope           [T, H, kv_lora_rank], with W_UK absorbed (absorb_q); q_pe [T, H, qk_rope_head_dim], RoPE applied
    ckv_cache        [nb, bs, kv_lora_rank], kpe_cache [nb, bs, qk_rope_head_dim]; any strides, q's dtype. A quantized
                     kv_format stores codes in ckv_cache, 4-bit ones two in a byte
    block_table, seq_lens, cu_seqlens_q, max_seqlen_q, causal   as in paged_attention
    softmax_scale    (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, times YaRN's mscale squared where the model has it;
                     never derived from the latent dims
    kv_format, k_scale, k_scale_cache   as in concat_and_cache_mla
    Returns out [T, H, kv_lora_rank] in q_nope's dtype (project_out makes it v_head_dim), and lse [T, H] float32,
    natural log, empty unless return_lse. A query with nothing to attend to gives out 0 and lse -inf.
    Undefined on accelerators: blocks that the cache lacks (the CPU kernel takes them as no block).
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    num_tokens, _, rank = q_nope.shape
    if num_tokens == 0 or seq_lens.shape[0] == 0 or max_seqlen_q <= 0:
        return _math.nothing_seen(q_nope, rank, return_lse)
    dtype = _math.compute_dtype(q_nope)
    latents, rotary = _formats.latent(kv_format, ckv_cache, kpe_cache, k_scale, k_scale_cache)
    q = torch.cat((q_nope, q_pe), -1).to(dtype)  # [T, H, kv_lora_rank + rope]
    outs, lses = [], []
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        table = block_table[sequence.index]
        ckv, exists = latents.gather(table, sequence.length, dtype)  # [S, kv_lora_rank], [S]
        kpe, _ = rotary.gather(table, sequence.length, dtype)
        k = torch.cat((ckv, kpe), -1)[:, None]  # one kv head
        allowed = exists[None] & (sequence.positions >= 0)[:, None]
        if causal:
            allowed = allowed & (torch.arange(len(exists), device=q.device)[None] <= sequence.positions[:, None])
        out, lse = _math.attend(q[sequence.tokens], k, k[..., :rank], allowed, softmax_scale)
        outs.append(out)
        lses.append(lse)
    out = _math.unpad(outs, cu_seqlens_q, num_tokens, 0.0).to(q_nope.dtype)
    if not return_lse:
        return out, q_nope.new_empty(0, dtype=torch.float32)
    return out, _math.unpad(lses, cu_seqlens_q, num_tokens, -torch.inf).float()


@mla_attention.check
def _(q_nope, q_pe, ckv_cache, kpe_cache, kv_format, k_scale, k_scale_cache, **_):
    latents, rotary = _formats.latent(kv_format, ckv_cache, kpe_cache, k_scale, k_scale_cache)
    _checks.same_dtype("q_nope", q_nope, q_pe=q_pe)
    latents.check("q_nope", q_nope, q_nope.shape[2])
    rotary.check("q_nope", q_nope)


@mla_attention.values
def _(q_nope, ckv_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, **_):
    _checks.batch(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q_nope.shape[0], ckv_cache)


@mla_attention.fake
def _(q_nope, return_lse, **_):
    num_tokens, num_heads, _ = q_nope.shape
    return (
        q_nope.new_empty(q_nope.shape),
        q_nope.new_empty((num_tokens, num_heads) if return_lse else (0,), dtype=torch.float32),
    )


@mla_attention.samples
def _(device, dtype):
    def call(
        pool: Pool, q_lens: list[int], seq_lens: list[int], heads: int = 3, rank: int = 32, rope: int = 8,
        fused: bool = False, **other: Any,
    ) -> dict[str, Any]:  # fmt: skip
        pages = torch.full((pool.num_blocks, pool.block_size, rank + rope), torch.nan, dtype=dtype, device=device)
        batch, tables = pool.batch(q_lens, seq_lens)
        pool.fill(pages, tables, seq_lens)
        ckv_cache, kpe_cache = pages[..., :rank], pages[..., rank:]
        if not fused:
            ckv_cache, kpe_cache = ckv_cache.contiguous(), kpe_cache.contiguous()
        num_tokens = sum(q_lens)
        caches = dict(ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        queries = dict(q_nope=pool.randn(num_tokens, heads, rank), q_pe=pool.randn(num_tokens, heads, rope))
        return {**queries, **caches, **batch, "softmax_scale": 0.15, "return_lse": True, **other}

    for name, q_lens, seq_lens in BATCHES:
        yield name, call(Pool(device, dtype, num_blocks=12), q_lens, seq_lens)
    for block_size, num_blocks in ((1, 60), (16, 6), (61, 3)):
        pool = Pool(device, dtype, num_blocks=num_blocks, block_size=block_size)
        yield f"block {block_size}", call(pool, [3, 1], [19, 30])
    pool = Pool(device, dtype)
    mixed = [1, 4], [9, 7]
    yield "fused cache", call(pool, *mixed, fused=True)
    yield "one head, odd dims", call(pool, *mixed, heads=1, rank=7, rope=2)
    yield "not causal", call(pool, *mixed, causal=False)
    yield "no lse", call(pool, *mixed, return_lse=False)
    fused_q = pool.randn(5, 3, 40)
    yield "fused q", call(pool, *mixed, q_nope=fused_q[..., :32], q_pe=fused_q[..., 32:])
    yield "transposed q", call(pool, *mixed, q_nope=pool.randn(3, 5, 32).transpose(0, 1))
    padded = call(pool, *mixed)
    rows = dict(q_nope=torch.cat((padded["q_nope"], pool.randn(2, 3, 32))), q_pe=pool.randn(7, 3, 8))
    yield "rows past the batch", padded | rows
    holes = padded["block_table"].long()
    holes[:, 0] = -1
    yield "freed first block, int64 table", padded | dict(block_table=holes)
    yield "large logits", call(pool, *mixed, softmax_scale=100.0)
    for name, heads in (("64 heads", 64), ("production", 16), ("128 heads", 128)):
        pool = Pool(device, dtype, num_blocks=8, block_size=16)
        yield name, call(pool, [2, 1], [19, 40], heads=heads, rank=512, rope=64, fused=True)
