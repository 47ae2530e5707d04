"""A stand-in for DeepGEMM on CPU tensors: its published signatures, checks and conventions, results in float64.

Read in github.com/deepseek-ai/DeepGEMM at 54e22612409371d6364144b69086735beb54e98b (2026-06-23):
csrc/apis/attention.hpp (signatures, checks, what a row of compressed logits holds), tests/test_attention.py (pages: all
codes, then all scales; scores). Our reading, not DeepSeek's code. Columns that are not computed hold NaN here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbackend.backends import nvidia

from .library import Library, need

SMS = 132  # of an H200


def _arch() -> int:
    major = nvidia.capability()[0]
    need(major in (9, 10), "unsupported architecture")
    return major


def get_num_sms() -> int:
    return SMS


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    need(context_lens.dim() == 2 and context_lens.dtype is torch.int32 and context_lens.is_contiguous(), "context_lens")
    need(block_kv == 64 or (_arch() == 10 and block_kv == 32), f"block_kv {block_kv}")
    need(indices is None, "varlen is not used")
    return context_lens.sum().expand(num_sms + 1, 2).int().contiguous()  # marks which lengths it was made for


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[seq_len, seq_len_kv], or with max_seqlen_k [seq_len, max_seqlen_k] whose rows begin at their own start."""
    codes, scales = kv
    queries = _queries(q, weights, 3)
    need(codes.dtype is torch.float8_e4m3fn and codes.is_contiguous() and codes.shape[1] == queries.shape[2], "kv")
    need(scales.dtype is torch.float32 and scales.shape == codes.shape[:1] and scales.is_contiguous(), "scales of kv")
    for ends in (cu_seq_len_k_start, cu_seq_len_k_end):
        need(ends.dtype is torch.int32 and ends.shape == queries.shape[:1] and ends.is_contiguous(), "starts and ends")
    need(logits_dtype is torch.float32 and not (clean_logits and max_seqlen_k), "options")
    keys = codes.double() * scales.double()[:, None]
    width = max_seqlen_k or len(keys)
    logits = torch.full((len(queries), width), torch.nan)
    for t, (start, end) in enumerate(zip(cu_seq_len_k_start.tolist(), cu_seq_len_k_end.tolist(), strict=True)):
        need(0 <= start <= end <= len(keys) and end - start <= width, f"keys {start} to {end}")
        first = 0 if max_seqlen_k else start
        logits[t, first : first + end - start] = _scores(queries[t], weights[t], keys[start:end])
        if clean_logits:
            logits[t, :start], logits[t, end:] = -torch.inf, -torch.inf
    return logits


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """[batch * next_n, max_context_len]."""
    queries = _queries(q, weights, 4)
    batch, next_n, _, dim = queries.shape
    blocks, block_kv, heads, width = kv_cache.shape
    need(block_kv == 64 or (_arch() == 10 and block_kv == 32), f"block_kv {block_kv}")
    need(heads == 1 and width == dim + 4 and kv_cache.dtype is torch.uint8, "kv_cache")
    need(kv_cache.stride(1) == width and kv_cache.stride(3) == 1 and kv_cache.stride(0) % 4 == 0, "strides of kv_cache")
    need(
        block_table.dtype is torch.int32 and block_table.shape[0] == batch and block_table.stride(1) == 1, "block_table"
    )
    need(context_lens.dtype is torch.int32 and context_lens.shape == (batch, next_n), "context_lens")
    need(context_lens.is_contiguous() and not clean_logits and logits_dtype is torch.float32, "options")
    need(schedule_meta.shape == (SMS + 1, 2) and schedule_meta.is_contiguous(), "schedule_meta")
    need(int(schedule_meta[0, 0]) == int(context_lens.sum()), "schedule_meta was made for other lengths")
    need(indices is None, "varlen is not used")
    logits = torch.full((batch * next_n, max_context_len), torch.nan)
    for row, length in enumerate(context_lens.flatten().tolist()):
        need(0 < length <= max_context_len, f"{length} keys")
        table = block_table[row // next_n, : -(-length // block_kv)].tolist()
        need(all(0 <= block < blocks for block in table), f"blocks {table}")
        keys = []
        for block in table:
            page = kv_cache[block].as_strided((block_kv * width,), (1,))
            scales = page[block_kv * dim :].clone().view(torch.float32).double()
            keys.append(page[: block_kv * dim].view(torch.float8_e4m3fn).double().view(block_kv, dim) * scales[:, None])
        logits[row, :length] = _scores(queries.flatten(0, 1)[row], weights[row], torch.cat(keys)[:length])
    return logits


def _queries(q: tuple[Tensor, Tensor | None], weights: Tensor, dims: int) -> Tensor:
    codes, scales = q
    need(scales is None and codes.dtype is torch.float8_e4m3fn, "fp8 queries have no scale")
    need(codes.dim() == dims and codes.is_contiguous(), "q")
    need(codes.shape[-2] in ((32, 64) if _arch() == 9 else (8, 16, 32, 64)), f"{codes.shape[-2]} heads")
    need(codes.shape[-1] in (32, 64, 128), "dims of q")
    need(weights.dtype is torch.float32 and weights.is_contiguous(), "weights")
    need(weights.shape == (codes.shape[:-2].numel(), codes.shape[-2]), "sizes of weights")
    return codes


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    return (weights.double() @ (q.double() @ keys.T).relu()).float()


def library() -> Library:
    functions = (get_num_sms, get_paged_mqa_logits_metadata, fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits)
    return Library("deep_gemm", {function.__name__: function for function in functions})
