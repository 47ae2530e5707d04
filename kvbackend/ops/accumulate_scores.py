"""How much attention the cached tokens of a sequence get: what eviction policies choose by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import Float, Float32, Index, Int32, Rows, need
from ..spec import op
from . import _checks, _formats, _math
from ._samples import BATCHES, Maker, Pool

_CHUNK = 128  # queries whose probabilities the reference holds at a time


@op(group="evicting", mutates=("scores", "score_cache"))
def accumulate_scores(
    q: Float[Tensor, "T H D"],
    key_cache: Rows[Tensor, "nb bs Hk key_width"],
    block_table: Index[Tensor, "B max_blocks"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens_q: Int32[Tensor, "B+1"],
    max_seqlen_q: int,
    softmax_scale: float,
    scores: Float32[Tensor, "B Hk S"] | None = None,
    score_cache: Float32[Tensor, "nb bs Hk"] | None = None,
    last_queries: int = -1,
    window: int = -1,
    softcap: float = 0.0,
    sinks: Float[Tensor, "H"] | None = None,
    k_scale: Float32[Tensor, "*k_scale"] | None = None,
    k_scale_cache: Rows[Tensor, "nb *k_scales"] | None = None,
    kv_format: str = "auto",
    key_positions: Index[Tensor, "nb bs"] | None = None,
    rope_cos_sin: Float[Tensor, "P rotary_dim"] | None = None,
    rope_interleaved: bool = False,
    key_bias: Float32[Tensor, "nb bs Hk"] | None = None,
) -> None:
    """Add the attention that queries pay to each cached token of their sequence to that token's score.

    For kv head k and cached token j, with G = H / Hk query heads reading kv head k,

        score[k, j] += 1/G  sum over the counted queries i of the sequence and the G heads h of  P[i, h, j]

    where P[i, h, :] is the causal softmax of paged_attention over all keys that query i sees. The queries are the last
    tokens of their sequence, as there, and their own keys are scored too.

    q                [T, H, D]; any strides
    key_cache        [nb, bs, Hk, D], any strides, q's dtype; a quantized kv_format stores codes
    block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale   the batch, as in paged_attention
    scores           [B, Hk, S] float32, added to: column j is the token in row j of its sequence. S is at least the
                     longest sequence; columns past a sequence keep what they hold
    score_cache      [nb, bs, Hk] float32 pages, added to at the slots of the tokens. One of the two is given
    last_queries     how many of a sequence's queries count, from its end; -1: all of them
    window, softcap, sinks, k_scale, k_scale_cache, kv_format, key_positions, rope_cos_sin, rope_interleaved, key_bias
                     as in paged_attention; a kv_format of two names gives the keys' first. sinks take mass that no
                     token gets

    What the policies count:
      H2O      every query from the first on, each once: last_queries = -1, into scores that live as long as the tokens
      SnapKV   the last W of the prompt: last_queries = W, into zeros; the W newest tokens are kept without being asked
      TOVA     the newest: last_queries = 1, into zeros; its mean over kv heads is the mean over query heads
    H2O's sums favour old tokens, which more queries see.

    A query that sees no key adds nothing. NaN in a key or query makes scores NaN, which select_tokens never selects.
    Undefined: in `score_cache`, a block that two sequences of the call share; on accelerators, blocks that the cache
    lacks.
    Source: H2O (arXiv 2306.14048), section 4; SnapKV (arXiv 2404.14469), section 4; TOVA (arXiv 2401.06104), section 3.
    """
    _math.check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
    num_tokens, num_heads, dim = q.shape
    if num_tokens == 0 or seq_lens.shape[0] == 0 or max_seqlen_q <= 0:
        return
    keys = _formats.keys(key_cache, kv_format, k_scale, k_scale_cache)
    dtype, kv_heads = _math.compute_dtype(q), key_cache.shape[2]
    for sequence in _math.sequences(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens):
        table = block_table[sequence.index]
        k, exists = keys.gather(table, sequence.length, dtype)  # [rows, Hk, D], [rows]
        k_position = torch.arange(len(exists), device=q.device)
        q_position = sequence.positions
        counts = q_position >= 0
        if last_queries >= 0:
            counts = counts & (q_position >= sequence.length - last_queries)
        if key_positions is not None:
            k_position, _ = _math.gather_rows(key_positions, table, sequence.length)
            q_position = k_position.long().gather(0, q_position.clamp(0, max(len(exists) - 1, 0)))
        if rope_cos_sin is not None:
            half = rope_cos_sin.shape[-1] // 2
            angles = rope_cos_sin[k_position.long().clamp(0, rope_cos_sin.shape[0] - 1)].to(dtype)[:, None]  # over Hk
            turned = _math.rotate(k[..., : 2 * half], angles[..., :half], angles[..., half:], rope_interleaved)
            k = torch.cat((turned, k[..., 2 * half :]), -1)
        bias = None
        if key_bias is not None:
            bias = _math.gather_rows(key_bias, table, sequence.length)[0].to(dtype).mT[None, :, None]
            # [1, Hk, 1, rows]
        mass = k.new_zeros(kv_heads, len(exists))
        for at in range(0, len(sequence.tokens), _CHUNK):
            part = slice(at, at + _CHUNK)
            grouped = q[sequence.tokens[part]].to(dtype).reshape(-1, kv_heads, num_heads // kv_heads, dim)
            logits = torch.einsum("nkgd,skd->nkgs", grouped, k) * softmax_scale
            if softcap > 0:
                logits = softcap * torch.tanh(logits / softcap)
            if bias is not None:
                logits = logits + bias
            position = q_position[part, None]
            seen = exists[None] & counts[part, None] & (k_position[None] <= position)  # [n, rows]
            if window > 0:
                seen = seen & (k_position[None] > position - window)
            unseen = ~seen[:, None, None]
            lse = logits.masked_fill(unseen, -torch.inf).logsumexp(-1, keepdim=True)
            if sinks is not None:
                lse = torch.logaddexp(lse, sinks.to(dtype).reshape(kv_heads, -1, 1))
            mass += _math.probabilities(logits, lse, unseen).sum(0).mean(1)  # [n, Hk, G, rows] -> [Hk, rows]
        if scores is not None:
            shared = min(scores.shape[2], len(exists))
            scores[sequence.index, :, :shared] += mass[:, :shared]
        if score_cache is not None and len(exists):
            block_size, row = key_cache.shape[1], torch.arange(len(exists), device=q.device)
            slots = torch.where(exists, table.long()[row // block_size] * block_size + row % block_size, -1)
            before, _ = _math.gather_rows(score_cache, table, sequence.length)
            _math.write_rows(score_cache, slots, before + mass.mT)


@accumulate_scores.check
def _(q, key_cache, scores, score_cache, window, softcap, k_scale, k_scale_cache, kv_format, rope_cos_sin, **_):
    given = [name for name, tensor in (("scores", scores), ("score_cache", score_cache)) if tensor is not None]
    need(
        len(given) == 1,
        f"{' and '.join(given) or 'neither scores nor score_cache'} {'are' if given else 'is'} given; exactly one of "
        f"scores [B, Hk, S] and score_cache [nb, bs, Hk] takes the sums: pass one",
    )
    _formats.keys(key_cache, kv_format, k_scale, k_scale_cache).check("q", q, q.shape[2])
    _checks.heads_divide(q.shape[1], key_cache.shape[2])
    _checks.window(window)
    _checks.softcap(softcap)
    _checks.rope_at_read(rope_cos_sin, q)


@accumulate_scores.values
def _(q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, scores, **_):
    _checks.batch(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, q.shape[0], key_cache)
    if scores is not None:
        _checks.within("seq_lens", seq_lens, 0, scores.shape[2] + 1, "length", f"scores have {scores.shape[2]} columns")


@accumulate_scores.fake
def _(**_):
    return None


@accumulate_scores.samples
def _(device, dtype):
    def call(
        pool: Pool, q_lens: list[int], seq_lens: list[int], group: int = 3, paged: bool = False, **other: Any
    ) -> dict[str, Any]:
        key_cache, _ = pool.caches()
        batch, tables = pool.batch(q_lens, seq_lens)
        pool.fill(key_cache, tables, seq_lens)
        q = pool.randn(sum(q_lens), pool.kv_heads * group, pool.head_dim)
        earlier = Maker(device, torch.float32)
        columns = max(seq_lens, default=0) + 2
        if paged:
            sums = dict(score_cache=earlier.randn(pool.num_blocks, pool.block_size, pool.kv_heads))
        else:
            sums = dict(scores=earlier.randn(len(seq_lens), pool.kv_heads, columns))
        return {"q": q, "key_cache": key_cache, **batch, "softmax_scale": pool.head_dim**-0.5, **sums, **other}

    for name, q_lens, seq_lens in BATCHES:
        yield name, call(Pool(device, dtype, num_blocks=12), q_lens, seq_lens)
        yield f"{name}, paged", call(Pool(device, dtype, num_blocks=12), q_lens, seq_lens, paged=True)
    for name, pool in Pool.variants(device, dtype):
        yield name, call(pool, [3, 1], [19, 30], group=4 if name == "production" else 2, paged=name != "production")

    pool = Pool(device, dtype)
    mixed = [3, 4], [9, 7]
    yield "MHA", call(pool, *mixed, group=1)
    yield "last two queries", call(pool, *mixed, last_queries=2)
    yield "last query", call(pool, *mixed, last_queries=1, paged=True)
    yield "no query", call(pool, *mixed, last_queries=0)
    yield "more last queries than there are", call(pool, *mixed, last_queries=50)
    yield "window", call(pool, *mixed, window=3)
    yield "softcap", call(pool, *mixed, softcap=2.0, softmax_scale=1.5)
    yield "sinks", call(pool, *mixed, sinks=Maker(device, torch.float32).randn(6))
    yield "large logits", call(pool, *mixed, softmax_scale=200.0)
    wide = pool.randn(7, 6, 3 * pool.head_dim)
    yield "sliced q", call(pool, *mixed, q=wide[..., pool.head_dim : 2 * pool.head_dim])
    padded = call(pool, *mixed)
    yield "rows past the batch", padded | dict(q=torch.cat((padded["q"], pool.randn(2, 6, pool.head_dim))))
    yield "int64 block table", padded | dict(block_table=padded["block_table"].long())
    holes = padded["block_table"].clone()
    holes[:, 0] = -1
    yield "freed first block", padded | dict(block_table=holes)
    every = Maker(device, torch.float32).randn(2, 2, 24)
    yield "strided scores", padded | dict(scores=every[..., ::2])
    kept = (torch.arange(pool.num_blocks * pool.block_size) * 3 % 37).view(pool.num_blocks, pool.block_size)
    in_order = kept.sort(-1).values.to(device)
    yield "key positions", call(pool, [1, 1], [3, 4], key_positions=in_order, window=20)
    table = Maker(device, torch.float32).randn(40, 8)
    yield "rope at read", call(pool, *mixed, rope_cos_sin=table, rope_interleaved=True)
    bias = Maker(device, torch.float32).randn(pool.num_blocks, pool.block_size, pool.kv_heads)
    yield "key bias", call(pool, *mixed, key_bias=bias)
    yield "window beyond every key", call(pool, *mixed, window=2**31 - 1)
