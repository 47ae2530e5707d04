"""FlashInfer as this backend calls it: signatures and limits, read in github.com/flashinfer-ai/flashinfer at fb28d72
(0.6.18, 2026-08-22). Nothing here was observed on a device.
"""

from __future__ import annotations

import torch

from ..limits import Steps, one
from ..nvidia import Function, Limit, Package

COMMIT = "fb28d7242b3506a2348265962041acc1fb56cca4"
_AT = "FlashInfer fb28d72, {}"

PACKAGE = Package(
    "flashinfer",
    "pip install flashinfer-python",
    {
        "decode.trtllm_batch_decode_with_kv_cache": (
            "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale",
            "bmm2_scale", "sinks", "kv_layout", "return_lse",
        ),
        "mla.trtllm_batch_decode_with_kv_cache_mla": (
            "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim",
            "block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale", "backend",
        ),
        "prefill.BatchPrefillWithPagedKVCacheWrapper": ("float_workspace_buffer", "kv_layout"),
        "prefill.BatchPrefillWithPagedKVCacheWrapper.plan": (
            "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads",
            "num_kv_heads", "head_dim_qk", "page_size", "head_dim_vo", "causal", "sm_scale", "window_left",
            "logits_soft_cap", "q_data_type", "kv_data_type",
        ),
        "prefill.BatchPrefillWithPagedKVCacheWrapper.run": ("q", "paged_kv_cache", "return_lse"),
        "mla.BatchMLAPagedAttentionWrapper": ("float_workspace_buffer",),
        "mla.BatchMLAPagedAttentionWrapper.plan": (
            "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe",
            "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type",
        ),
        "mla.BatchMLAPagedAttentionWrapper.run": ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "return_lse"),
        "cascade.merge_states": ("v", "s"),
    },
    _AT.format("flashinfer/"),
)  # fmt: skip

HALVES = one(torch.bfloat16, torch.float16)
RANK, ROPE = 512, 64  # of DeepSeek-V2 to V3.2

DECODE = Function(
    "trtllm_batch_decode_with_kv_cache",
    majors=(9, 10, 12),  # XQA on 9.0 and 12.x, trtllm-gen on 10.x
    source=_AT.format("flashinfer/decode.py"),
    limits=(
        Limit("dtype", HALVES),
        Limit("head_dim", Steps(16, 256), (9, 12), _AT.format("flashinfer/jit/xqa.py")),
        Limit("head_dim", one(128, 256), (10,), _AT.format("tests/attention/test_trtllm_gen_attention_decode.py")),
        Limit("block_size", one(16, 32, 64, 128), (9, 12), _AT.format("flashinfer/jit/xqa.py")),
        Limit("block_size", one(16, 32, 64), (10,), _AT.format("tests/attention/test_trtllm_gen_attention_decode.py")),
        Limit("group", Steps(1, 16), source=_AT.format("tests/attention/test_xqa.py: not tested above")),
    ),
    note="XQA returns no lse. Whether a window or NaN behind a sequence reach its result must be shown on a device.",
)

PREFILL = Function(
    "BatchPrefillWithPagedKVCacheWrapper",
    majors=(8, 9, 10, 12),
    source=_AT.format("flashinfer/prefill.py"),
    limits=(
        Limit("dtype", HALVES),
        Limit("dims", one((64, 64), (128, 128), (256, 256), (192, 128)), source=_AT.format("flashinfer/utils.py")),
    ),
    note="plan copies lengths to the host; its lse is base 2.",
)

MLA_DECODE = Function(
    "trtllm_batch_decode_with_kv_cache_mla",
    majors=(10,),
    source=_AT.format("flashinfer/mla/_core.py"),
    limits=(
        Limit("dtype", one(torch.bfloat16)),
        Limit("rank", one(RANK)),
        Limit("rope_dim", one(ROPE)),
        Limit("num_heads", Steps(1, 128), source=_AT.format("tests/attention/test_trtllm_gen_mla.py")),
        Limit("block_size", one(32, 64), source=_AT.format("tests/attention/test_trtllm_gen_mla.py")),
    ),
    note="The base of its lse is not documented.",
)

MLA_PREFILL = Function(
    "BatchMLAPagedAttentionWrapper",
    majors=(8, 9),  # on 10.x it warns of poor performance
    source=_AT.format("flashinfer/mla/_core.py"),
    limits=(
        Limit("dtype", HALVES),
        Limit("rank", one(RANK)),
        Limit("rope_dim", one(ROPE)),
    ),
    note="plan copies lengths to the host; its lse is base 2.",
)

MERGE_STATES = Function(
    "merge_states",
    majors=(8, 9, 10, 12),
    source=_AT.format("csrc/cascade.cu and include/flashinfer/utils.cuh"),
    limits=(
        Limit("dtype", HALVES),
        Limit("value_dim", one(64, 128, 256, 512)),
    ),
    note="lse is base 2; what becomes of a row whose parts are all empty differs between versions.",
)

ALL = (DECODE, PREFILL, MLA_DECODE, MLA_PREFILL, MERGE_STATES)
