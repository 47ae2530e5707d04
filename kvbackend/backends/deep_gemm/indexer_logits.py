"""fp8_fp4_paged_mqa_logits for decoding, each query as a sequence of its own; for longer chunks fp8_fp4_mqa_logits over
keys that are gathered first. Both leave columns that a query does not see as they were; they become -inf here.
"""

import torch

from ...ops import _math, _pages
from .. import single_queries
from .vendor import LOGITS, PAGED_LOGITS

RECORDS = ("index_fp8_132", "v41_index_fp8_132")
DIM, ROW_BYTES = 128, 132


def unsupported(q, weights, key_cache, seq_lens, kv_format, block_size, **_):
    prefill = single_queries.is_prefill("q", q, seq_lens)
    vendor = LOGITS if prefill else PAGED_LOGITS
    yield from vendor.missing()
    yield from vendor.refuse("dtype", q.dtype, "q is", "quantize it, with its scale in the weights")
    yield from vendor.refuse("num_heads", q.shape[1], "q's heads are", "use backend 'cuda_triton'")
    if weights.dtype is not torch.float32:
        yield f"weights are {weights.dtype}; {vendor.name} gives float32 scores for float32 ones: convert them"
    if kv_format not in RECORDS:
        yield (
            f"kv_format is {kv_format!r}; {vendor.name} reads {' and '.join(RECORDS)} with fp8 queries "
            f"({vendor.source}): write the index keys in one of these"
        )
        return
    if not prefill:
        rows = _pages.block_size_of(key_cache, kv_format, block_size)
        yield from vendor.refuse("block_size", rows, "keys of a block are", "allocate blocks of 64")
    if key_cache.stride(1) != 1 or key_cache.stride(0) % 4 != 0:
        yield f"key_cache has bytes apart or odd pages; {vendor.name} reads whole pages: make it contiguous"


def run(
    q, weights, key_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, compress_ratio, kv_format, block_size
):
    num_tokens, rows = q.shape[0], _pages.block_size_of(key_cache, kv_format, block_size)
    width = block_table.shape[1] * rows
    if 0 in (num_tokens, width, seq_lens.shape[0], key_cache.shape[0]) or max_seqlen_q <= 0:
        return torch.full((num_tokens, width), -torch.inf, device=q.device)
    sequence, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    seen = (own.clamp(min=-1) + 1) // compress_ratio  # [T] keys that a query sees
    first_keys = torch.arange(block_table.shape[1], device=q.device) * rows
    used = (block_table >= 0) & (first_keys < (seq_lens // compress_ratio)[:, None])
    table = torch.where(used, block_table, 0).int()
    # 1 where none is seen: the scheduler is not documented for 0
    lengths = seen.clamp(1, width).int()
    q, weights = q.contiguous(), weights.contiguous()
    score = paged if num_tokens <= single_queries.MOST * seq_lens.shape[0] else gathered
    scores = score(q, weights, key_cache, table, sequence, lengths, rows)
    column = torch.arange(width, device=q.device)
    exists = used[sequence].repeat_interleave(rows, 1, output_size=width) & (column < seen[:, None])
    return torch.where(exists, scores, -torch.inf)


def paged(q, weights, key_cache, table, sequence, lengths, rows):
    """Scores [T, max_blocks * rows] with each query as a sequence of one."""
    import deep_gemm

    context_lens = lengths[:, None]  # [T, 1]
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context_lens, rows, deep_gemm.get_num_sms())
    pages = key_cache.as_strided(
        (key_cache.shape[0], rows, 1, ROW_BYTES), (key_cache.stride(0), ROW_BYTES, ROW_BYTES, 1)
    )
    return deep_gemm.fp8_fp4_paged_mqa_logits(
        q=(q[:, None], None),  # [T, 1, Hi, Di], and no scale: it is in the weights
        kv_cache=pages,
        weights=weights,
        context_lens=context_lens,
        block_table=table[sequence],
        schedule_meta=schedule,
        max_context_len=table.shape[1] * rows,
    )


def gathered(q, weights, key_cache, table, sequence, lengths, rows):
    """The same scores from keys that follow each other: sequence b's start at row b * width."""
    import deep_gemm

    width = table.shape[1] * rows
    pages = key_cache[table.flatten().long()]  # [B * max_blocks, page_bytes]
    codes = pages[:, : rows * DIM].reshape(-1, DIM).view(torch.float8_e4m3fn)
    scales = pages[:, rows * DIM : rows * ROW_BYTES].contiguous().view(torch.float32).flatten()
    starts = (sequence * width).int()
    return deep_gemm.fp8_fp4_mqa_logits(
        q=(q, None), kv=(codes, scales), weights=weights, cu_seq_len_k_start=starts, cu_seq_len_k_end=starts + lengths,
        clean_logits=False, max_seqlen_k=width,  # row t holds its own sequence's scores, from column 0 on
    )  # fmt: skip
