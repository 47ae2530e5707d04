"""A stand-in for FlashMLA on CPU tensors: its published signatures, checks and conventions, results in float64.

Read in github.com/deepseek-ai/FlashMLA at 9241ae3ef9bac614dd25e45e507e089f888280e0 (2026-04-29):
flash_mla/flash_mla_interface.py (signatures, when metadata are filled, what may not be given together),
csrc/api/dense_decode.h, sparse_decode.h, sparse_fwd.h (devices, dtypes, shapes, strides), csrc/sm90/*/splitkv_mla.cuh
and csrc/sm90/prefill/sparse/phase1.cuh (numbers of indices; lse: natural logarithm, +inf without a key),
tests/quant.py (the two record layouts). Our reading, not DeepSeek's code. Whatever is undefined is rejected here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .library import Library, need


@dataclass
class FlashMLASchedMeta:
    """Metadata that the first call fills; later calls must be of the same sizes."""

    have_initialized: bool = False
    config: tuple[Any, ...] | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [b, s_q, h, 512] in q's dtype and lse [b, h, s_q] float32."""
    need(isinstance(tile_scheduler_metadata, FlashMLASchedMeta), "tile_scheduler_metadata is no FlashMLASchedMeta")
    need(num_splits is None, "num_splits is given")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    config = (q.shape[:3], k_cache.shape[1:3], causal, is_fp8_kvcache, indices is not None and indices.shape[-1])
    need(
        not tile_scheduler_metadata.have_initialized or tile_scheduler_metadata.config == config,
        "tile_scheduler_metadata was filled for other sizes",
    )
    tile_scheduler_metadata.have_initialized, tile_scheduler_metadata.config = True, config
    need(q.dim() == 4 and k_cache.dim() == 4, "q and k_cache have 4 dims")
    need(q.stride(-1) == 1 and k_cache.stride(-1) == 1, "the last dim is strided")
    need(q.shape[0] > 0 and q.shape[1] > 0 and head_dim_v == 512, "sizes")
    need(k_cache.shape[2] == 1, "the models that we call it for have one kv head")
    if indices is None:
        need(block_table is not None and cache_seqlens is not None, "block_table and cache_seqlens are needed")
        need(attn_sink is None and extra_k_cache is None and topk_length is None, "dense attention has no such thing")
        need(not is_fp8_kvcache, "dense attention over fp8 is not in dense_decode.h")
        return _dense(q, k_cache, block_table, cache_seqlens, scale, causal)
    need(not causal and is_fp8_kvcache, "sparse attention is not causal and reads fp8")
    return _sparse(
        q, k_cache, indices, scale, attn_sink, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length
    )


def _dense(q: Tensor, k_cache: Tensor, table: Any, lengths: Any, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    need(q.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype == q.dtype, "dtype of q and k_cache")
    need(table.dtype is torch.int32 and lengths.dtype is torch.int32, "block_table and cache_seqlens are int32")
    need(table.stride(-1) == 1 and lengths.is_contiguous(), "block_table or cache_seqlens is strided")
    batch, queries, heads, dim = q.shape
    need(dim in (512, 576) and k_cache.shape[1] == 64 and k_cache.shape[3] == dim, "head size or page size")
    need(table.shape[0] == batch and lengths.shape == (batch,), "sizes of the batch")
    out, lse = q.new_zeros(batch, queries, heads, 512), torch.full((batch, heads, queries), torch.inf)
    for b, length in enumerate(lengths.tolist()):
        need(0 < length <= table.shape[1] * 64, f"a sequence of {length} tokens")
        blocks = table[b, : -(-length // 64)].tolist()
        need(all(0 <= block < k_cache.shape[0] for block in blocks), f"blocks {blocks}")
        rows = torch.cat([k_cache[block, :, 0] for block in blocks])[:length].double()
        for i in range(queries):
            seen = rows[: length - queries + i + 1] if causal and queries > 1 else rows
            out[b, i], lse[b, :, i] = attend(q[b, i], seen, scale)
    return out, lse


def _sparse(
    q: Tensor, k_cache: Tensor, indices: Tensor, scale: float, sink: Any, length: Any, extra: Any, extra_indices: Any,
    extra_length: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, queries, heads, dim = q.shape
    need(q.dtype is torch.bfloat16, "q is bfloat16")
    need(heads in (64, 128), f"{heads} heads")
    need((extra is None) == (extra_indices is None), "extra_k_cache and its indices come together")
    need(extra is not None or extra_length is None, "extra_topk_length without extra_k_cache")
    need(sink is None or (sink.dtype is torch.float32 and sink.shape == (heads,) and sink.is_contiguous()), "attn_sink")
    need(4 * (5 * batch + 1) <= 227 * 1024, "the scheduler's shared memory holds no such batch")
    scopes = [(k_cache, indices, length)] + ([(extra, extra_indices, extra_length)] if extra is not None else [])
    out, lse = q.new_zeros(batch, queries, heads, 512), torch.full((batch, heads, queries), torch.inf)
    for _, chosen, _ in scopes:
        need(chosen.dtype is torch.int32 and chosen.shape[:2] == (batch, queries) and chosen.stride(-1) == 1, "indices")
        need(chosen.shape[2] > 0 and chosen.shape[2] % 64 == 0, f"{chosen.shape[2]} indices")
    for b in range(batch):
        for i in range(queries):
            parts = []
            for pages, chosen, most in scopes:
                used = chosen[b, i] if most is None else chosen[b, i, : int(most[b])]
                parts.append(records(pages, dim, used[used != -1]))
            out[b, i], lse[b, :, i] = attend(q[b, i], torch.cat(parts), scale, sink)
    return out, lse


def records(pages: Tensor, dim: int, slots: Tensor) -> Tensor:
    """The rows [n, dim] float64 of slots in pages [nb, bs, 1, bytes] of one of the two layouts."""
    need(pages.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn), "records are bytes")
    row_bytes = {576: 656, 512: 584}.get(dim, -1)
    blocks, block_size, heads, width = pages.shape
    need(heads == 1 and width == row_bytes and pages.stride(1) == row_bytes and pages.stride(3) == 1, "record layout")
    need(bool(((slots >= 0) & (slots < blocks * block_size)).all()), f"slots {slots.tolist()}")
    found = []
    for slot in slots.tolist():
        block, offset = divmod(slot, block_size)
        page = pages[block].view(torch.uint8)
        if dim == 576:  # 512 codes, a float32 scale for each 128, 64 bfloat16
            row = page[offset, 0]
            codes, scales, rope = row[:512], row[512:528].clone().view(torch.float32), row[528:]
            scales = scales.double().repeat_interleave(128)
        else:  # all rows of 448 codes and 64 bfloat16, then all rows of 7 powers of two and a pad
            flat = page.as_strided((block_size * 584,), (1,))
            row = flat[offset * 576 : (offset + 1) * 576]
            exponents = flat[block_size * 576 + offset * 8 :][:7]
            codes, rope = row[:448], row[448:]
            scales = (2.0 ** (exponents.double() - 127)).repeat_interleave(64)
        nope = codes.clone().view(torch.float8_e4m3fn).double() * scales
        found.append(torch.cat((nope, rope.clone().view(torch.bfloat16).double())))
    return torch.stack(found) if found else torch.zeros(0, dim, dtype=torch.float64)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [s_q, h, 512], max_logits and lse [s_q, h] float32."""
    need(q.dtype is torch.bfloat16 and kv.dtype is torch.bfloat16 and indices.dtype is torch.int32, "dtypes")
    need(q.dim() == 3 and kv.dim() == 3 and indices.dim() == 3 and d_v == 512, "dims")
    num_tokens, heads, dim = q.shape
    need(heads in (64, 128) and dim in (512, 576) and kv.shape[1:] == (1, dim), "sizes of q and kv")
    need(indices.shape[:2] == (num_tokens, 1), "indices are [s_q, 1, topk]")
    need(indices.shape[2] > 0 and indices.shape[2] % 128 == 0, f"{indices.shape[2]} indices")
    need(q.stride(-1) == 1 and kv.stride(-1) == 1 and indices.stride(-1) == 1, "the last dim is strided")
    out, lse = q.new_zeros(num_tokens, heads, 512), torch.full((num_tokens, heads), torch.inf)
    largest = torch.full((num_tokens, heads), -torch.inf)
    for i in range(num_tokens):
        chosen = indices[i, 0] if topk_length is None else indices[i, 0, : int(topk_length[i])]
        chosen = chosen[(chosen >= 0) & (chosen < kv.shape[0])]
        rows = kv[chosen.long(), 0].double()
        out[i], lse[i] = attend(q[i], rows, sm_scale, attn_sink)
        if len(rows):
            largest[i] = ((q[i].double() @ rows.T) * sm_scale).amax(-1).float()
    return out, largest, lse


def attend(q: Tensor, rows: Tensor, scale: float, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One query [h, D] over rows [n, D], whose first 512 numbers are values: out [h, 512] and lse [h]."""
    if not len(rows):
        return q.new_zeros(q.shape[0], 512), torch.full((q.shape[0],), torch.inf)
    logits = (q.double() @ rows.T) * scale
    lse = logits.logsumexp(-1)
    whole = lse if sink is None else torch.logaddexp(lse, sink.double())
    return ((logits - whole[:, None]).exp() @ rows[:, :512]).to(q.dtype), lse.float()


def library() -> Library:
    functions = (get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd)
    named = {function.__name__: function for function in functions}
    return Library("flash_mla", {**named, "flash_mla_interface.FlashMLASchedMeta": FlashMLASchedMeta})
