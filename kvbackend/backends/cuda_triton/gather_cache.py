"""Two launches of triton/rows.py: the slot of each row, then the rows."""

import torch

from ...codecs import split
from ...formats import get
from ...ops import _formats
from . import cached, launching, rows


def unsupported(cache, kv_format, out_format, **_):
    if kv_format == "auto" and out_format != "auto":
        yield from launching.floats(cache=cache)
    if cache.ndim > 4:
        yield f"cache has {cache.ndim} dims; the Triton kernel reads rows of up to two: flatten the row's dims"


def run(cache, block_table, cu_seqlens, num_tokens, seq_starts, kv_format, scale, scale_cache, out_format):
    from ...triton.rows import gather_slots

    source = _formats.Cached("cache", cache, kv_format, "scale", scale, "scale_cache", scale_cache)
    dtype = torch.float32 if source.quantized else cache.dtype
    if out_format != "auto":
        dtype = split.storage(get(out_format))
    out = cache.new_empty(num_tokens, *source.row_shape(), dtype=dtype)
    num_seqs, max_blocks = block_table.shape
    if 0 in (*cache.shape[:2], num_seqs, max_blocks):
        return out.zero_()
    slots = torch.empty(num_tokens, dtype=torch.int64, device=cache.device)
    launching.launch(
        gather_slots, (num_tokens,), block_table, *block_table.stride(), cu_seqlens,
        cu_seqlens if seq_starts is None else seq_starts, slots, num_seqs, num_tokens, max_blocks, cache.shape[1],
        HAS_STARTS=seq_starts is not None, num_warps=1,
    )  # fmt: skip
    heads, dim = (1, 1, *source.row_shape())[-2:]
    target = out
    if source.quantized:
        operand = cached.operand(source)
    else:
        pages = cache.reshape(*cache.shape[:2], 1, 1) if cache.dim() == 2 else cache
        if dtype is cache.dtype:  # bit for bit
            pages, target = launching.as_integers(pages), launching.as_integers(out)
        operand = cached.plain(pages.unsqueeze(2) if pages.dim() == 3 else pages)
    rows.read(operand, slots, target, heads, dim, cache.shape[1], target.dtype.is_floating_point)
    return out
