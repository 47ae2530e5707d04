"""DeepGEMM as this backend calls it: signatures and limits, read in github.com/deepseek-ai/DeepGEMM at 54e2261
(2026-06-23). Nothing here was observed on a device.
"""

from __future__ import annotations

import torch

from ..limits import one
from ..nvidia import Function, Limit, Package

COMMIT = "54e22612409371d6364144b69086735beb54e98b"
_AT = "DeepGEMM 54e2261, csrc/apis/attention.hpp"

PACKAGE = Package(
    "deep_gemm",
    "build it from github.com/deepseek-ai/DeepGEMM with the CUDA toolkit",
    {
        "fp8_fp4_mqa_logits": ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "clean_logits",
                               "max_seqlen_k"),
        "fp8_fp4_paged_mqa_logits": ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta",
                                     "max_context_len"),
        "get_paged_mqa_logits_metadata": ("context_lens", "block_kv", "num_sms"),
        "get_num_sms": (),
    },
    _AT,
)  # fmt: skip

_DTYPE = Limit("dtype", one(torch.float8_e4m3fn))
_HEADS = (Limit("num_heads", one(32, 64), (9,)), Limit("num_heads", one(8, 16, 32, 64), (10,)))

PAGED_LOGITS = Function(
    "fp8_fp4_paged_mqa_logits",
    majors=(9, 10),
    source=_AT,
    limits=(
        _DTYPE,
        *_HEADS,
        Limit("block_size", one(64), (9,)),
        Limit("block_size", one(32, 64), (10,)),
    ),
    note="NaN among codes of keys may become a score of 0: its maximum with 0 is the device's.",
)

LOGITS = Function(
    "fp8_fp4_mqa_logits",
    majors=(9, 10),
    source=_AT,
    limits=(_DTYPE, *_HEADS),
    note="As fp8_fp4_paged_mqa_logits.",
)

ALL = (PAGED_LOGITS, LOGITS)
