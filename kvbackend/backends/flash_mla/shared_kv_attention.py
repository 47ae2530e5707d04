"""flash_mla_with_kvcache with indices over DeepSeek-V4's records: the window's rows, and compressed ones as extra."""

import torch

from ...ops import _math, _pages
from . import sparse
from .vendor import SPARSE_DECODE as VENDOR

RECORD = "v4_fp8_584"
ROW_BYTES = 584


def unsupported(q, window_cache, kv, compressed_cache, window_format, kv_format, **_):
    yield from VENDOR.missing()
    yield from VENDOR.refuse("dtype", q.dtype, "q is", "convert it")
    yield from VENDOR.refuse("num_heads", q.shape[1], "q's heads are", "split them over devices")
    if kv is not None:
        yield f"kv is given; {VENDOR.name} reads cached rows alone ({VENDOR.source}): write them before the call"
    pools = [("window_format", window_format, "window_cache", window_cache)]
    if compressed_cache is not None:
        pools.append(("kv_format", kv_format, "compressed_cache", compressed_cache))
    for format_name, format_, name, pages in pools:
        if format_ != RECORD:
            yield (
                f"{format_name} is {format_!r}; {VENDOR.name} reads {RECORD!r} for rows of 512 ({VENDOR.source}): "
                f"write {name} in it"
            )
        elif pages.stride(1) != 1 or pages.stride(0) % 16 != 0:
            yield f"{name} has bytes apart or odd pages; {VENDOR.name} reads whole pages: make it contiguous"


def run(
    q, window_cache, window_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, window, kv, compressed_cache,
    block_table, topk_indices, compress_ratio, window_format, kv_format, sinks, cos_sin, return_lse,
):  # fmt: skip
    num_tokens, dim = q.shape[0], q.shape[2]
    if num_tokens == 0 or seq_lens.shape[0] == 0 or max_seqlen_q <= 0:
        return _math.nothing_seen(q, dim, return_lse)
    sequence, own = _math.query_positions(cu_seqlens_q, seq_lens, max_seqlen_q, num_tokens)
    scopes = []  # pages and their slots: a pool without blocks gives none
    if 0 not in (window_table.shape[1], window_cache.shape[0]):
        pages = records(window_cache)
        ring = window_table.shape[1] * pages.shape[1]  # rows of a sequence; position p is row p % ring
        position = own[:, None] - torch.arange(window, device=q.device)  # [T, window]
        held = (position >= 0) & (position >= seq_lens[sequence][:, None] - ring)
        scopes.append((pages, sparse.slots_of(position % ring, held, window_table[sequence], pages.shape[1])))
    if compressed_cache is not None and 0 not in (block_table.shape[1], compressed_cache.shape[0]):
        pages = records(compressed_cache)
        if topk_indices is None:
            topk_indices = torch.arange(block_table.shape[1] * pages.shape[1], device=q.device).expand(num_tokens, -1)
        visible = (topk_indices >= 0) & (topk_indices < ((own.clamp(min=-1) + 1) // compress_ratio)[:, None])
        if topk_indices.shape[1] > 0:
            scopes.append((pages, sparse.slots_of(topk_indices, visible, block_table[sequence], pages.shape[1])))
    if not scopes:
        return _math.nothing_seen(q, dim, return_lse)
    out, lse = sparse.decode(q, scopes, softmax_scale, sinks)
    out, lse = sparse.cleaned(out, lse, return_lse)
    if cos_sin is not None:
        plain = dim - cos_sin.shape[1]
        turned = _math.rotate_at(out[..., plain:], own, cos_sin, interleaved=True, inverse=True)
        out = torch.cat((out[..., :plain], turned), -1)
    return out, lse


def records(pages):
    """Pages [nb, page_bytes] as FlashMLA takes them, [nb, bs, 1, 584]: all data of a page, then all its scales."""
    rows = _pages.block_size_of(pages, RECORD)
    return pages.as_strided((pages.shape[0], rows, 1, ROW_BYTES), (pages.stride(0), ROW_BYTES, ROW_BYTES, 1))
