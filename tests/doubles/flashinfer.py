"""A stand-in for FlashInfer on CPU tensors: its published signatures, checks and conventions, results in float64.

Read in github.com/flashinfer-ai/flashinfer at fb28d7242b3506a2348265962041acc1fb56cca4 (0.6.18, 2026-08-22):
flashinfer/decode.py (trtllm_batch_decode_with_kv_cache, which backend on which GPU), prefill.py and mla/_core.py (the
wrappers' plan and run), cascade.py with csrc/cascade.cu (merge_states), jit/xqa.py (sizes), csrc/batch_prefill_sm90.cu
(strides), include/flashinfer/attention/cascade.cuh and tests/attention (lse in base 2). Our reading, not FlashInfer's
code. Whatever is undefined is rejected here, or answered with NaN.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvbackend.backends import nvidia

from .library import Library, need

HALVES = (torch.bfloat16, torch.float16)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [n, H, D], k [S, Hk, D], v [S, Hk, Dv]: out [n, H, Dv] in q's dtype, lse [n, H] in base 2, NaN without keys."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("nhd,shd->nhs", q.double(), k) * scale
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    if allowed is not None:
        logits = logits.masked_fill(~allowed[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    whole = lse if sinks is None else torch.logaddexp(lse, sinks.double())
    out = torch.einsum("nhs,shd->nhd", (logits - whole[..., None]).exp(), v)
    nothing = lse == -torch.inf
    out = out.masked_fill(nothing[..., None], torch.nan)
    return out.to(q.dtype), (lse / math.log(2)).masked_fill(nothing, torch.nan).float()


def pages_of(cache: Tensor, blocks: list[int], length: int) -> Tensor:
    """The rows [length, ...] of blocks in a cache [pages, page_size, ...]."""
    need(all(0 <= block < cache.shape[0] for block in blocks), f"blocks {blocks}")
    return torch.cat([cache[block] for block in blocks])[:length]


def bottom_right(queries: int, keys: int, causal: bool, window_left: int = -1) -> Tensor:
    """[queries, keys]: which keys a query may see; the queries are the last tokens."""
    own = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    allowed = (key <= own) if causal else torch.ones(queries, keys, dtype=torch.bool)
    return allowed & (key >= own - window_left) if window_left >= 0 else allowed


def zeroed(workspace_buffer: Tensor) -> None:
    need(workspace_buffer.dtype is torch.uint8 and workspace_buffer.numel() >= 128 << 20, "workspace_buffer")
    need(not workspace_buffer[: 1 << 20].any(), "workspace_buffer must be zeros at first")


def tables(block_tables: Tensor, seq_lens: Tensor, batch: int) -> None:
    need(block_tables.dtype is torch.int32 and block_tables.dim() == 2 and block_tables.is_contiguous(), "block_tables")
    need(seq_lens.dtype is torch.int32 and seq_lens.is_contiguous(), "seq_lens")
    need(block_tables.shape[0] == batch and seq_lens.shape == (batch,), "sizes of the batch")


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    out: Any = None,
    out_dtype: Any = None,
    o_sf_scale: Any = None,
    o_sf_vec_size: Any = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Any = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Any = None,
    return_lse: bool = False,
    bmm1_scale_log2: Any = None,
    multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Any = None,
) -> Any:
    major = nvidia.capability()[0]
    need(major in (9, 10, 12), "neither XQA nor trtllm-gen runs on this GPU")
    xqa = major != 10
    need(not (xqa and return_lse), "xqa returns no lse")
    need(kv_layout in ("NHD", "HND") and q_len_per_req == 1 and window_left == -1, "options")
    need(isinstance(kv_cache, tuple), "a pair of caches")
    k, v = kv_cache if kv_layout == "NHD" else (cache.transpose(1, 2) for cache in kv_cache)
    need(query.dtype in HALVES and k.dtype == query.dtype and v.dtype == query.dtype, "dtypes")
    batch, heads, dim = query.shape
    need(k.shape == v.shape and k.shape[3] == dim and k.stride(3) == 1 and v.stride(3) == 1, "caches")
    need(k.stride() == v.stride(), "xqa takes the strides of the keys for the values")
    page_size = k.shape[1]
    need(page_size in ((16, 32, 64, 128) if xqa else (16, 32, 64)), f"pages of {page_size}")
    need((dim % 16 == 0 and 16 <= dim <= 256) if xqa else dim in (128, 256), f"head_dim {dim}")
    need(heads % k.shape[2] == 0 and heads // k.shape[2] <= 16, "query heads of a kv head")
    need(query.is_contiguous() or not xqa, "xqa takes a dense query")
    need(sinks is None or (sinks.dtype is torch.float32 and sinks.shape == (heads,)), "sinks")
    tables(block_tables, seq_lens, batch)
    zeroed(workspace_buffer)
    found, logs = query.new_empty(query.shape), torch.empty(batch, heads)
    for b, length in enumerate(seq_lens.tolist()):
        need(0 < length <= max_seq_len, f"a sequence of {length} tokens")
        blocks = block_tables[b, : -(-length // page_size)].tolist()
        keys, values = pages_of(k, blocks, length), pages_of(v, blocks, length)
        row, log = attend(query[b : b + 1], keys, values, bmm1_scale, sinks=sinks)
        found[b], logs[b] = (row[0].double() * bmm2_scale).to(query.dtype), log[0]
    return (found, logs) if return_lse else found


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Any = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Any = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Any = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Any = None,
    sparse_mla_top_k_lens: Any = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Any = None,
    use_fp16_softmax: bool | None = None,
) -> Tensor:
    need(nvidia.capability()[0] == 10, "dense bfloat16 MLA is trtllm-gen's")
    need(not return_lse and sinks is None and sparse_mla_top_k == 0, "options")
    need(query.dim() == 4 and query.shape[1] == 1 and query.dtype is torch.bfloat16, "query [B, 1, H, 576]")
    batch, _, _, dim = query.shape
    need((kv_lora_rank, qk_rope_head_dim) == (512, 64) and dim == 576, "dims of DeepSeek's MLA")
    need(kv_cache.dim() == 3 and kv_cache.shape[2] == dim and kv_cache.stride(2) == 1, "kv_cache")
    need(kv_cache.dtype == query.dtype and kv_cache.shape[1] in (32, 64), "kv_cache")
    need(
        backend == "trtllm-gen" or (block_tables.shape[1] * kv_cache.shape[1]) % 128 == 0,
        "tables of 128 tokens, but for trtllm-gen",
    )
    need(seq_lens is not None, "seq_lens")
    assert seq_lens is not None
    tables(block_tables, seq_lens, batch)
    zeroed(workspace_buffer)
    found = query.new_empty(batch, 1, query.shape[2], kv_lora_rank)
    for b, length in enumerate(seq_lens.tolist()):
        need(0 < length <= max_seq_len, f"a sequence of {length} tokens")
        rows = pages_of(kv_cache, block_tables[b, : -(-length // kv_cache.shape[1])].tolist(), length)[:, None]
        row, _ = attend(query[b], rows, rows[..., :512], bmm1_scale)
        found[b] = (row.double() * bmm2_scale).to(query.dtype)
    return found


class Planned:
    """What both wrappers' plans hold."""

    def sequences(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor, size: int) -> None:
        for name, array in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("kv lengths", kv_lens)):
            need(array.dtype is torch.int32, f"{name} is int32")
        need(kv_indices.dtype is torch.int32, "indices are int32")
        need(int(qo_indptr[0]) == 0 and int(kv_indptr[0]) == 0, "running sums begin with 0")
        need(len(qo_indptr) == len(kv_indptr) == len(kv_lens) + 1, "sizes of the batch")
        self.batch = []
        for i, length in enumerate(kv_lens.tolist()):
            queries, blocks = (ptr[i : i + 2].tolist() for ptr in (qo_indptr, kv_indptr))
            need(queries[0] < queries[1], "a sequence without queries")
            need(blocks[1] - blocks[0] == -(-length // size) and length > 0, f"{length} tokens in {blocks}")
            need(blocks[1] <= len(kv_indices), "more pages than indices")
            self.batch.append((slice(*queries), kv_indices[slice(*blocks)].tolist(), length))


class BatchPrefillWithPagedKVCacheWrapper(Planned):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        need(float_workspace_buffer.numel() >= 128 << 20 and kv_layout in ("NHD", "HND"), "wrapper")
        self.layout = kv_layout

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        need(nvidia.capability()[0] >= 8, "compute capability")
        dims = (head_dim_qk, head_dim_vo or head_dim_qk)
        need(dims in ((64, 64), (128, 128), (256, 256), (192, 128)), f"dims {dims}")
        need(num_qo_heads % num_kv_heads == 0, "heads")
        pages = paged_kv_indptr.diff()
        need(bool(((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all()), "last pages")
        kv_lens = (pages - 1) * page_size + paged_kv_last_page_len
        self.sequences(qo_indptr, paged_kv_indptr, paged_kv_indices, kv_lens, page_size)
        self.sizes = (num_qo_heads, num_kv_heads, dims, page_size)
        self.dtypes = (q_data_type, kv_data_type or q_data_type)
        self.options = (
            causal,
            window_left,
            logits_soft_cap or 0.0,
            head_dim_qk**-0.5 if sm_scale is None else sm_scale,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        k, v = paged_kv_cache if self.layout == "NHD" else (cache.transpose(1, 2) for cache in paged_kv_cache)
        heads, kv_heads, dims, page_size = self.sizes
        need((q.dtype, k.dtype) == self.dtypes and q.dtype in HALVES, f"dtypes {self.dtypes}")
        need(q.shape[0] == self.batch[-1][0].stop and q.shape[1:] == (heads, dims[0]), "q")
        need(k.shape[1:] == (page_size, kv_heads, dims[0]) and v.shape[1:] == (page_size, kv_heads, dims[1]), "caches")
        need(q.stride(-1) == 1 and k.stride(-1) == 1, "the last dim is strided")
        need(k.stride() == v.stride() or nvidia.capability()[0] != 9, "strides of keys and values")
        causal, left, softcap, scale = self.options
        found, logs = q.new_empty(q.shape[0], heads, dims[1]), torch.empty(q.shape[0], heads)
        for rows, blocks, length in self.batch:
            allowed = bottom_right(rows.stop - rows.start, length, causal, left)
            keys, values = pages_of(k, blocks, length), pages_of(v, blocks, length)
            found[rows], logs[rows] = attend(q[rows], keys, values, scale, allowed, softcap)
        return (found, logs) if return_lse else found


class BatchMLAPagedAttentionWrapper(Planned):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
    ) -> None:
        need(float_workspace_buffer.numel() >= 128 << 20, "wrapper")

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        need((head_dim_ckv, head_dim_kpe) == (512, 64) and q_data_type in HALVES, "dims or dtype")
        self.sequences(qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size)
        self.options = (num_heads, page_size, causal, sm_scale, q_data_type, kv_data_type)

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Any = None,
        kpe_scale: float | None = None,
    ) -> Any:
        num_heads, page_size, causal, scale, q_dtype, kv_dtype = self.options
        need(q_nope.dtype == q_pe.dtype == q_dtype and ckv_cache.dtype == kpe_cache.dtype == kv_dtype, "dtypes")
        need(q_nope.shape[1:] == (num_heads, 512) and q_pe.shape[1:] == (num_heads, 64), "queries")
        need(ckv_cache.shape[1:] == (page_size, 512) and kpe_cache.shape[1:] == (page_size, 64), "caches")
        need(q_nope.shape[0] == self.batch[-1][0].stop, "rows of q_nope")
        need(all(x.stride(-1) == 1 for x in (q_nope, q_pe, ckv_cache, kpe_cache)), "the last dim is strided")
        found, logs = torch.empty_like(q_nope), torch.empty(q_nope.shape[:2])
        for rows, blocks, length in self.batch:
            ckv, kpe = pages_of(ckv_cache, blocks, length)[:, None], pages_of(kpe_cache, blocks, length)[:, None]
            q, k = torch.cat((q_nope[rows], q_pe[rows]), -1), torch.cat((ckv, kpe), -1)
            allowed = bottom_right(rows.stop - rows.start, length, causal)
            found[rows], logs[rows] = attend(q, k, ckv, scale, allowed)
        logs = logs * math.log(2) if return_lse_base_on_e else logs
        return (found, logs) if return_lse else found


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    need(v.dim() == 4 and s.shape == v.shape[:3] and s.dtype is torch.float32, "states")
    need(v.is_contiguous() and s.is_contiguous() and v.dtype in HALVES, "CHECK_INPUT")
    need(v.shape[3] in (64, 128, 256, 512) and v.shape[0] > 0, f"head_dim {v.shape[3]}")
    need(not s.isinf().any(), "the difference of two infinities")
    total = torch.logsumexp(s.nan_to_num(-1e30).double() * math.log(2), 1) / math.log(2)
    weights = torch.exp2(s.nan_to_num(-1e30).double() - total[:, None])
    return (weights[..., None] * v.double()).sum(1).to(v.dtype), total.float()


def library() -> Library:
    return Library(
        "flashinfer",
        {
            "decode.trtllm_batch_decode_with_kv_cache": trtllm_batch_decode_with_kv_cache,
            "mla.trtllm_batch_decode_with_kv_cache_mla": trtllm_batch_decode_with_kv_cache_mla,
            "prefill.BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
            "mla.BatchMLAPagedAttentionWrapper": BatchMLAPagedAttentionWrapper,
            "cascade.merge_states": merge_states,
        },
    )
