from typing import Any

import torch

from ...ops import _formats, _math
from . import cached, launching
from .attending import DECODE_QUERIES, MAX_SPLITS, MIN_TOKENS, block_n, merge, parts


def unsupported(q, value_cache, sinks, kv_format, **_):
    yield from launching.floats(q=q, sinks=sinks)
    yield from launching.small_heads(q=q.shape[2], value_cache=_formats.values(value_cache, kv_format).width())


def run(
    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, softmax_scale,
    page_size, num_sinks, num_recent, softcap, sinks, k_scale, v_scale, k_scale_cache, v_scale_cache, kv_format,
    return_lse,
):  # fmt: skip
    from ...triton.sparse_attention import sparse_attention

    pair = _formats.caches(key_cache, value_cache, kv_format, k_scale, v_scale, k_scale_cache, v_scale_cache)
    (num_tokens, num_heads, dim), value_dim = q.shape, pair[1].width()
    (_, block_size, kv_heads, _), num_seqs, topk = key_cache.shape, seq_lens.shape[0], topk_indices.shape[2]
    out, lse = _math.nothing_seen(q, value_dim, return_lse)
    most = min(num_sinks + num_recent + page_size - 1, block_table.shape[1] * block_size) + topk  # tokens of a query
    if 0 in (num_tokens, num_heads, num_seqs, most, block_table.shape[1], key_cache.numel()) or max_seqlen_q <= 0:
        return out, lse
    keys, values = map(cached.operand, pair)
    few, splits = min(DECODE_QUERIES, max_seqlen_q), min(MAX_SPLITS, launching.cdiv(most, MIN_TOKENS))
    part_out, part_lse = parts(q, num_seqs, splits, few, value_dim)
    group, heads = num_heads // kv_heads, 16
    seq_lens, cu_seqlens_q = seq_lens.contiguous(), cu_seqlens_q.contiguous()
    args = (
        q, *q.stride(), *keys.rows, *keys.scales, keys.number, *values.rows, *values.scales, values.number,
        block_table, *block_table.stride(), seq_lens, cu_seqlens_q, topk_indices, *topk_indices.stride(), topk,
        part_lse if sinks is None else sinks.contiguous(), out, lse, part_out, part_lse, num_seqs, num_heads, group,
        dim, value_dim, block_size, float(softmax_scale), float(softcap), page_size, num_sinks, num_recent, few,
    )  # fmt: skip
    narrow = q.dtype is torch.float32 or keys.quantized or values.quantized
    constants: dict[str, Any] = dict(
        **keys.prefixed("K"), **values.prefixed("V"), MAX_SPLITS=MAX_SPLITS, MIN_TOKENS=MIN_TOKENS,
        SOFTCAP=softcap > 0, SINKS=sinks is not None, LSE=return_lse, DOT=launching.dot_type(q.dtype), HEADS=heads,
        BLOCK_N=block_n(narrow), BLOCK_D=launching.dot_block(dim),
        BLOCK_V=launching.dot_block(value_dim), num_warps=4 if narrow else 8, num_stages=1 if narrow else 2,
    )  # fmt: skip
    tiles = kv_heads * launching.cdiv(group, heads)
    launching.launch(sparse_attention, (num_seqs * few, tiles, splits), *args, SPLIT=True, **constants)
    if max_seqlen_q > few:
        launching.launch(sparse_attention, (num_tokens, tiles, 1), *args, SPLIT=False, **constants)
    merge(part_out, part_lse, out, lse, seq_lens, cu_seqlens_q, sinks, whole=True)
    return out, lse
