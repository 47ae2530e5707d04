import torch

from . import attending, launching, scoring


def unsupported(q, **_):
    yield from launching.floats(q=q)
    yield from launching.small_heads(q=q.shape[2])


def run(
    q, low_cache, high_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, page_size, num_sinks, num_recent
):  # fmt: skip
    from ...triton.page_logits import page_logits

    num_tokens, num_heads, dim = q.shape
    num_seqs, block_size, kv_heads = seq_lens.shape[0], low_cache.shape[1], low_cache.shape[2]
    columns = block_table.shape[1] * block_size
    out = torch.empty(num_tokens, kv_heads, columns, dtype=torch.float32, device=q.device)
    if 0 in (num_tokens, num_heads, num_seqs, columns) or max_seqlen_q <= 0:
        return out.fill_(-torch.inf)
    group, block_n = num_heads // kv_heads, attending.block_n(q.dtype is torch.float32)
    tiles = launching.cdiv(columns, block_n)
    launching.launch(
        page_logits, (num_tokens * tiles, kv_heads), q, *q.stride(), low_cache, *low_cache.stride(), high_cache,
        *high_cache.stride(), block_table, *block_table.stride(), seq_lens.contiguous(), cu_seqlens_q.contiguous(), out,
        num_seqs, group, dim, block_size, columns, tiles, page_size, num_sinks, num_recent,
        DOT=launching.dot_type(q.dtype), HEADS=scoring.block_of(group, 32), BLOCK_N=block_n,
        BLOCK_D=launching.dot_block(dim), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
