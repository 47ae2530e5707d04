from typing import Any

import torch

from ...ops import _formats
from . import cached, launching
from .attending import DECODE_QUERIES, MAX_SPLITS, MIN_TOKENS, block_n, decode_tiles


def unsupported(q, key_cache, sinks, rope_cos_sin, **_):
    yield from launching.floats(q=q, sinks=sinks)
    yield from launching.rope_at_read(rope_cos_sin)
    yield from launching.small_heads(q=q.shape[2])


def run(
    q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, scores, score_cache, last_queries,
    window, softcap, sinks, k_scale, k_scale_cache, kv_format, key_positions, rope_cos_sin, rope_interleaved, key_bias,
):  # fmt: skip
    from ...triton.accumulate_scores import add_mass, find_denominators, join_parts

    num_tokens, num_heads, dim = q.shape
    num_seqs, block_size, kv_heads = seq_lens.shape[0], key_cache.shape[1], key_cache.shape[2]
    capacity = block_table.shape[1] * block_size
    most = max_seqlen_q if last_queries < 0 else min(max_seqlen_q, last_queries)  # counted queries of a sequence
    if 0 in (num_tokens, num_seqs, capacity, key_cache.numel()) or most <= 0:
        return
    keys = cached.operand(_formats.keys(key_cache, kv_format, k_scale, k_scale_cache))
    group = num_heads // kv_heads
    narrow = q.dtype is torch.float32 or keys.quantized
    few = decode_tiles(group, narrow)
    decode_queries = min(few.queries, DECODE_QUERIES, most)
    splits = min(MAX_SPLITS, launching.cdiv(capacity, MIN_TOKENS))
    denominators = torch.empty(num_tokens, 2, num_heads, dtype=torch.float32, device=q.device)
    parts = torch.empty(num_seqs, splits, decode_queries, 2, num_heads, dtype=torch.float32, device=q.device)
    seq_lens, cu_seqlens_q = seq_lens.contiguous(), cu_seqlens_q.contiguous()
    counted = num_tokens if last_queries < 0 else last_queries
    if key_positions is None:
        window = min(window, capacity)  # the kernel adds positions to it, in 32 bits
    args = (
        q, *q.stride(), *keys.rows, *keys.scales, keys.number, block_table, *block_table.stride(), seq_lens,
        cu_seqlens_q, seq_lens if key_positions is None else key_positions,
        *((0, 0) if key_positions is None else key_positions.stride()), denominators if key_bias is None else key_bias,
        *((0, 0, 0) if key_bias is None else key_bias.stride()), denominators, num_heads, group, dim, block_size,
        float(softmax_scale), float(softcap), window, counted,
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        **keys.constants, WINDOW=window > 0, SOFTCAP=softcap > 0, POSITIONS=key_positions is not None,
        BIAS=key_bias is not None, DOT=launching.dot_type(q.dtype), BLOCK_D=launching.dot_block(dim),
    )  # fmt: skip
    parts_args = parts, denominators if sinks is None else sinks.contiguous(), decode_queries
    cut = dict(MAX_SPLITS=MAX_SPLITS, MIN_TOKENS=MIN_TOKENS, SINKS=sinks is not None)
    heads = kv_heads * launching.cdiv(group, few.heads)
    launching.launch(
        find_denominators, (num_seqs, heads, splits), *args, 1, *parts_args, SPLIT=True, **constants, **cut,
        **few.constants(),
    )  # fmt: skip
    block = min(launching.power_of_two(num_heads), 64)
    launching.launch(
        join_parts, (num_seqs, decode_queries, launching.cdiv(num_heads, block)), parts, denominators, parts_args[1],
        seq_lens, cu_seqlens_q, num_heads, splits, counted, decode_queries, **cut,
        SPLITS=launching.power_of_two(splits), BLOCK_H=block, num_warps=4,
    )  # fmt: skip
    block_m = 32 if narrow else 64
    many = dict(
        HEADS=min(group, block_m), BLOCK_M=block_m, BLOCK_N=block_n(narrow or dim > 128), num_warps=4, num_stages=1
    )
    if most > decode_queries:
        tiles = launching.cdiv(most, block_m // many["HEADS"])
        heads = kv_heads * launching.cdiv(group, many["HEADS"])
        launching.launch(
            find_denominators, (num_seqs * tiles, heads, 1), *args, tiles, *parts_args, SPLIT=False, **constants,
            **cut, **many,
        )  # fmt: skip
    sums = scores.transpose(1, 2) if score_cache is None else score_cache  # [sequence or block, row, head]
    tiles = launching.cdiv(capacity, many["BLOCK_N"])
    launching.launch(
        add_mass, (num_seqs * tiles, kv_heads), *args, tiles, sums, *sums.stride(), sums.shape[1],
        PAGED=score_cache is not None, **constants, **many | dict(num_warps=8),
    )  # fmt: skip
