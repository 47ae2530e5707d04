"""Mistakes that an adapter could make: each changes one call, or one step of an adapter, and must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any

import torch

from kvbackend.backends import latent, single_queries
from kvbackend.backends.deep_gemm import indexer_logits
from kvbackend.backends.flash_mla import shared_kv_attention, sparse
from kvbackend.backends.flashinfer import conventions, merge_attn_states, planned

Arguments = dict[str, Any]
Change = Callable[[Arguments], None]


@dataclass(frozen=True)
class CallMutation:
    """A call of a library with one thing changed."""

    provider: str
    op: str
    function: str
    name: str
    change: Change


@dataclass(frozen=True)
class StepMutation:
    """An adapter with one of its steps replaced."""

    provider: str
    op: str
    name: str
    module: Any
    attribute: str
    value: Any


def edit(argument: str, function: Callable[[Any], Any]) -> Change:
    """Change an argument where it is given."""

    def change(arguments: Arguments) -> None:
        if arguments.get(argument) is not None:
            arguments[argument] = function(arguments[argument])

    return change


def drop(*names: str) -> Change:
    def change(arguments: Arguments) -> None:
        for name in names:
            arguments.pop(name, None)

    return change


def put(**values: Any) -> Change:
    return lambda arguments: arguments.update(values)


def swap(first: str, second: str) -> Change:
    def change(arguments: Arguments) -> None:
        arguments[first], arguments[second] = arguments[second], arguments[first]

    return change


def parts_swapped(x: torch.Tensor) -> torch.Tensor:
    """Rows [.., 512 + 64] with the rotary part first."""
    return torch.cat((x[..., 512:], x[..., :512]), -1)


def without_first(indices: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.full_like(indices[..., :1], -1), indices[..., 1:]), -1)


KVCACHE, FWD = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
PAGED, LOGITS = "fp8_fp4_paged_mqa_logits", "fp8_fp4_mqa_logits"


def flash_mla(op: str, function: str, name: str, change: Change) -> CallMutation:
    return CallMutation("flash_mla", op, function, name, change)


def deep_gemm(function: str, name: str, change: Change) -> CallMutation:
    return CallMutation("deep_gemm", "indexer_logits", function, name, change)


def flashinfer(op: str, function: str, name: str, change: Change) -> CallMutation:
    return CallMutation("flashinfer", op, function, name, change)


def replaced(op: str, name: str, module: Any, attribute: str, value: Any) -> StepMutation:
    return StepMutation("flashinfer", op, name, module, attribute, value)


DECODE = "decode.trtllm_batch_decode_with_kv_cache"
PLAN, RUN = (f"prefill.BatchPrefillWithPagedKVCacheWrapper.{method}" for method in ("plan", "run"))
MLA_DECODE = "mla.trtllm_batch_decode_with_kv_cache_mla"
MLA_PLAN, MLA_RUN = (f"mla.BatchMLAPagedAttentionWrapper.{method}" for method in ("plan", "run"))
MERGE = "cascade.merge_states"
_PAGED, _MERGE = "paged_attention", "merge_attn_states"
_DENSE, _SPARSE, _SHARED = "mla_attention", "sparse_mla_attention", "shared_kv_attention"

MUTATIONS: list[CallMutation | StepMutation] = [
    # dense MLA
    flash_mla(_DENSE, KVCACHE, "scale dropped: 576 ** -0.5", drop("softmax_scale")),
    flash_mla(_DENSE, KVCACHE, "scale in base 2", edit("softmax_scale", lambda scale: scale / log(2))),
    flash_mla(_DENSE, KVCACHE, "query's parts swapped", edit("q", parts_swapped)),
    flash_mla(_DENSE, KVCACHE, "cache's parts swapped", edit("k_cache", parts_swapped)),
    flash_mla(_DENSE, KVCACHE, "cache with its head before its rows", edit("k_cache", lambda x: x.transpose(1, 2))),
    flash_mla(_DENSE, KVCACHE, "lengths one too long", edit("cache_seqlens", lambda lens: lens + 1)),
    flash_mla(_DENSE, KVCACHE, "lengths as int64", edit("cache_seqlens", torch.Tensor.long)),
    flash_mla(_DENSE, KVCACHE, "table as int64", edit("block_table", torch.Tensor.long)),
    flash_mla(_DENSE, KVCACHE, "table in reverse", edit("block_table", lambda table: table.flip(1))),
    flash_mla(_DENSE, KVCACHE, "heads in reverse", edit("q", lambda q: q.flip(2))),
    flash_mla(_DENSE, KVCACHE, "metadata dropped", put(tile_scheduler_metadata=None)),
    flash_mla(_DENSE, KVCACHE, "fp8 where rows are plain", put(is_fp8_kvcache=True)),
    StepMutation("flash_mla", _DENSE, "halves in the other order", latent, "query", lambda a, b: torch.cat((b, a), -1)),
    StepMutation(
        "flash_mla", _DENSE, "results of queries that see nothing left as they are", single_queries.SingleQueries,
        "results", lambda self, out, lse: (out, lse),
    ),
    # sparse MLA, plain rows
    flash_mla(_SPARSE, FWD, "scale in base 2", edit("sm_scale", lambda scale: scale / log(2))),
    flash_mla(_SPARSE, FWD, "indices one too high", edit("indices", lambda x: torch.where(x >= 0, x + 1, x))),
    flash_mla(_SPARSE, FWD, "indices as int64", edit("indices", torch.Tensor.long)),
    flash_mla(_SPARSE, FWD, "indices without a kv head", edit("indices", lambda x: x[:, 0])),
    flash_mla(_SPARSE, FWD, "indices not padded", edit("indices", lambda x: x[..., :6])),
    flash_mla(_SPARSE, FWD, "padding names token 0", edit("indices", lambda x: x.clamp(min=0))),
    flash_mla(_SPARSE, FWD, "query's parts swapped", edit("q", parts_swapped)),
    flash_mla(_SPARSE, FWD, "rows' parts swapped", edit("kv", parts_swapped)),
    flash_mla(_SPARSE, FWD, "heads not padded", edit("q", lambda q: q[:, :4])),
    flash_mla(_SPARSE, FWD, "d_v of 576", put(d_v=576)),
    StepMutation(
        "flash_mla", _SPARSE, "positions in place of slots", sparse, "slots_of",
        lambda positions, exists, *_: torch.where(exists, positions, -1).int(),
    ),
    StepMutation(
        "flash_mla", _SPARSE, "lse of an empty row left at +inf", sparse, "cleaned",
        lambda out, lse, return_lse: (out, lse if return_lse else lse.new_empty(0)),
    ),
    # sparse MLA, records
    flash_mla(_SPARSE, KVCACHE, "scale dropped: 576 ** -0.5", drop("softmax_scale")),
    flash_mla(_SPARSE, KVCACHE, "causal", put(causal=True)),
    flash_mla(_SPARSE, KVCACHE, "not said to be fp8", drop("is_fp8_kvcache")),
    flash_mla(_SPARSE, KVCACHE, "indices one too high", edit("indices", lambda x: torch.where(x >= 0, x + 1, x))),
    flash_mla(_SPARSE, KVCACHE, "indices with a kv head", edit("indices", lambda x: x[:, :, None])),
    flash_mla(_SPARSE, KVCACHE, "records of 584 bytes", edit("k_cache", lambda x: x[..., :584])),
    flash_mla(_SPARSE, KVCACHE, "pages in reverse", edit("k_cache", lambda x: x.flip(0))),
    flash_mla(_SPARSE, KVCACHE, "heads in reverse", edit("q", lambda q: q.flip(2))),
    StepMutation("flash_mla", _SPARSE, "indices in steps of 32", sparse, "INDICES", 32),
    # DeepSeek-V4's rows
    flash_mla(_SHARED, KVCACHE, "sinks dropped", drop("attn_sink")),
    flash_mla(_SHARED, KVCACHE, "sinks in base 2", edit("attn_sink", lambda sink: sink / log(2))),
    flash_mla(_SHARED, KVCACHE, "extra rows dropped", drop("extra_k_cache", "extra_indices_in_kvcache")),
    flash_mla(_SHARED, KVCACHE, "extra indices without their cache", drop("extra_k_cache")),
    flash_mla(_SHARED, KVCACHE, "caches swapped", swap("k_cache", "extra_k_cache")),
    flash_mla(_SHARED, KVCACHE, "indices swapped", swap("indices", "extra_indices_in_kvcache")),
    flash_mla(_SHARED, KVCACHE, "scale dropped by 2", edit("softmax_scale", lambda scale: scale / 2)),
    flash_mla(_SHARED, KVCACHE, "the query's own row dropped", edit("indices", without_first)),
    StepMutation("flash_mla", _SHARED, "records of 583 bytes", shared_kv_attention, "ROW_BYTES", 583),
    # indexer scores
    deep_gemm(PAGED, "lengths one less", edit("context_lens", lambda lens: (lens - 1).clamp(min=1))),
    deep_gemm(PAGED, "lengths without a dim", edit("context_lens", lambda lens: lens[:, 0])),
    deep_gemm(PAGED, "weights with queries' sign", edit("weights", torch.neg)),
    deep_gemm(PAGED, "weights of other heads", edit("weights", lambda x: x.flip(1).contiguous())),
    deep_gemm(PAGED, "table in reverse", edit("block_table", lambda table: table.flip(1))),
    deep_gemm(PAGED, "table as int64", edit("block_table", torch.Tensor.long)),
    deep_gemm(PAGED, "queries as bfloat16", edit("q", lambda q: (q[0].bfloat16(), None))),
    deep_gemm(PAGED, "queries with a scale", edit("q", lambda q: (q[0], torch.ones(1)))),
    deep_gemm(PAGED, "fewer columns", edit("max_context_len", lambda length: length - 1)),
    deep_gemm(PAGED, "metadata of other lengths", edit("schedule_meta", lambda schedule: schedule + 1)),
    deep_gemm(PAGED, "cleaned", put(clean_logits=True)),
    deep_gemm(LOGITS, "starts and ends swapped", swap("cu_seq_len_k_start", "cu_seq_len_k_end")),
    deep_gemm(LOGITS, "every sequence the first", edit("cu_seq_len_k_start", lambda x: x * 0)),
    deep_gemm(LOGITS, "ends one less", edit("cu_seq_len_k_end", lambda x: x - 1)),
    deep_gemm(LOGITS, "not compressed", put(max_seqlen_k=0)),
    deep_gemm(LOGITS, "scales of other keys", edit("kv", lambda kv: (kv[0], kv[1].flip(0)))),
    deep_gemm(LOGITS, "weights of other heads", edit("weights", lambda x: x.flip(1).contiguous())),
    StepMutation("deep_gemm", "indexer_logits", "scales a byte early", indexer_logits, "ROW_BYTES", 131),
    # paged attention, decoding
    flashinfer(_PAGED, DECODE, "keys and values swapped", edit("kv_cache", lambda caches: caches[::-1])),
    flashinfer(_PAGED, DECODE, "scale dropped", drop("bmm1_scale")),
    flashinfer(_PAGED, DECODE, "scale in base 2", edit("bmm1_scale", lambda scale: scale / log(2))),
    flashinfer(_PAGED, DECODE, "scale applied to values too", lambda a: a.update(bmm2_scale=a["bmm1_scale"])),
    flashinfer(_PAGED, DECODE, "layout dropped: HND", drop("kv_layout")),
    flashinfer(_PAGED, DECODE, "table in reverse", edit("block_tables", lambda table: table.flip(1))),
    flashinfer(_PAGED, DECODE, "table as int64", edit("block_tables", torch.Tensor.long)),
    flashinfer(_PAGED, DECODE, "lengths one too long", edit("seq_lens", lambda lens: lens + 1)),
    flashinfer(_PAGED, DECODE, "lengths one too short", edit("seq_lens", lambda lens: (lens - 1).clamp(min=1))),
    flashinfer(_PAGED, DECODE, "heads in reverse", edit("query", lambda q: q.flip(1))),
    flashinfer(_PAGED, DECODE, "sinks dropped", drop("sinks")),
    flashinfer(_PAGED, DECODE, "sinks in base 2", edit("sinks", lambda sinks: sinks / log(2))),
    flashinfer(_PAGED, DECODE, "max_seq_len of one block", put(max_seq_len=16)),
    flashinfer(_PAGED, DECODE, "workspace not zero", edit("workspace_buffer", torch.ones_like)),
    # paged attention, prompts
    flashinfer(_PAGED, PLAN, "causal dropped", drop("causal")),
    flashinfer(_PAGED, PLAN, "scale dropped where it is no head_dim ** -0.5", drop("sm_scale")),
    flashinfer(_PAGED, PLAN, "softcap dropped", drop("logits_soft_cap")),
    flashinfer(_PAGED, PLAN, "window one too wide", edit("window_left", lambda left: left + (left >= 0))),
    flashinfer(_PAGED, PLAN, "window dropped", drop("window_left")),
    flashinfer(_PAGED, PLAN, "dims of values dropped", drop("head_dim_vo")),
    flashinfer(_PAGED, PLAN, "last pages full", lambda a: a["paged_kv_last_page_len"].fill_(a["page_size"])),
    flashinfer(_PAGED, PLAN, "indices in reverse", edit("paged_kv_indices", lambda pages: pages.flip(0))),
    flashinfer(_PAGED, PLAN, "indices as int64", edit("paged_kv_indices", torch.Tensor.long)),
    flashinfer(_PAGED, PLAN, "queries, not their sum", edit("qo_indptr", lambda ptr: ptr.diff(prepend=ptr[:1]))),
    flashinfer(_PAGED, PLAN, "heads swapped", swap("num_qo_heads", "num_kv_heads")),
    flashinfer(_PAGED, PLAN, "dtype dropped: float16", drop("q_data_type")),
    flashinfer(_PAGED, RUN, "keys and values swapped", edit("paged_kv_cache", lambda caches: caches[::-1])),
    flashinfer(_PAGED, RUN, "lse not asked for", drop("return_lse")),
    replaced(_PAGED, "lse left in base 2", conventions, "natural", lambda lse: lse),
    replaced(_PAGED, "rows that see nothing left as they are", planned, "_empty", lambda lens, *_: torch.zeros(1) > 1),
    replaced(_PAGED, "queries that see nothing left as they are", single_queries.SingleQueries, "results",
             lambda self, out, lse: (out, lse)),
    # MLA
    flashinfer(_DENSE, MLA_DECODE, "query's parts swapped", edit("query", parts_swapped)),
    flashinfer(_DENSE, MLA_DECODE, "cache's parts swapped", edit("kv_cache", parts_swapped)),
    flashinfer(_DENSE, MLA_DECODE, "scale dropped", drop("bmm1_scale")),
    flashinfer(_DENSE, MLA_DECODE, "rank and rotary dims swapped", swap("kv_lora_rank", "qk_rope_head_dim")),
    flashinfer(_DENSE, MLA_DECODE, "backend dropped: auto", drop("backend")),
    flashinfer(_DENSE, MLA_DECODE, "lengths one too long", edit("seq_lens", lambda lens: lens + 1)),
    flashinfer(_DENSE, MLA_DECODE, "table in reverse", edit("block_tables", lambda table: table.flip(1))),
    flashinfer(_DENSE, MLA_PLAN, "not causal", put(causal=False)),
    flashinfer(_DENSE, MLA_PLAN, "scale of 576 dims", put(sm_scale=576**-0.5)),
    flashinfer(_DENSE, MLA_PLAN, "lengths one too short", edit("kv_len_arr", lambda lens: (lens - 1).clamp(min=1))),
    flashinfer(_DENSE, MLA_PLAN, "indices in reverse", edit("kv_indices", lambda pages: pages.flip(0))),
    flashinfer(_DENSE, MLA_PLAN, "running sums swapped", swap("qo_indptr", "kv_indptr")),
    flashinfer(_DENSE, MLA_RUN, "queries' heads in reverse", edit("q_nope", lambda q: q.flip(1))),
    flashinfer(_DENSE, MLA_RUN, "lse in base e", put(return_lse_base_on_e=True)),
    # merging
    flashinfer(_MERGE, MERGE, "parts before tokens", edit("v", lambda v: v.transpose(0, 1).contiguous())),
    flashinfer(_MERGE, MERGE, "parts in reverse", edit("s", lambda s: s.flip(1).contiguous())),
    flashinfer(_MERGE, MERGE, "strided", edit("v", lambda v: torch.stack((v, v), -1)[..., 0])),
    replaced(_MERGE, "lse left natural on the way in", conventions, "base_2", lambda lse: lse),
    replaced(_MERGE, "lse left in base 2 on the way out", conventions, "natural", lambda lse: lse),
    replaced(_MERGE, "empty parts as -inf", merge_attn_states, "LOWEST", -float("inf")),
    StepMutation("deep_gemm", "indexer_logits", "codes of 124", indexer_logits, "DIM", 124),
]  # fmt: skip
