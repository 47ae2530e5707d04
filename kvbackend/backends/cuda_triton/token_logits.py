import torch

from ...ops import _formats
from . import attending, cached, launching, scoring


def unsupported(q, **_):
    yield from launching.floats(q=q)
    yield from launching.small_heads(q=q.shape[2])


def run(
    q, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, pages, page_size, num_sinks, num_recent, k_scale,
    k_scale_cache, kv_format,
):  # fmt: skip
    from ...triton.token_logits import token_logits

    num_tokens, num_heads, dim = q.shape
    num_seqs, block_size, kv_heads = seq_lens.shape[0], key_cache.shape[1], key_cache.shape[2]
    columns = pages.shape[2] * page_size
    out = torch.empty(num_tokens, kv_heads, columns, dtype=torch.float32, device=q.device)
    if 0 in (num_tokens, num_heads, num_seqs, columns, block_table.shape[1], block_size) or max_seqlen_q <= 0:
        return out.fill_(-torch.inf)
    keys = cached.operand(_formats.keys(key_cache, kv_format, k_scale, k_scale_cache))
    group, block_n = num_heads // kv_heads, attending.block_n(q.dtype is torch.float32 or keys.quantized)
    tiles = launching.cdiv(columns, block_n)
    launching.launch(
        token_logits, (num_tokens * tiles, kv_heads), q, *q.stride(), *keys.rows, *keys.scales, keys.number,
        block_table, *block_table.stride(), seq_lens.contiguous(), cu_seqlens_q.contiguous(), pages, *pages.stride(),
        out, num_seqs, group, dim, block_size, columns, tiles, page_size, num_sinks, num_recent, **keys.constants,
        DOT=launching.dot_type(q.dtype), HEADS=scoring.block_of(group, 32), BLOCK_N=block_n,
        BLOCK_D=launching.dot_block(dim), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
