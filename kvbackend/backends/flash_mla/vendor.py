"""FlashMLA as this backend calls it: signatures and limits, read in github.com/deepseek-ai/FlashMLA at 9241ae3
(2026-04-29). Nothing here was observed on a device.
"""

from __future__ import annotations

import torch

from ..limits import Steps, one
from ..nvidia import Function, Limit, Package

COMMIT = "9241ae3ef9bac614dd25e45e507e089f888280e0"
_AT = "FlashMLA 9241ae3, csrc/api/{}"

PACKAGE = Package(
    "flash_mla",
    "build it from github.com/deepseek-ai/FlashMLA with the CUDA toolkit",
    {
        "get_mla_metadata": (),
        "flash_mla_with_kvcache": (
            "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "softmax_scale",
            "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache",
        ),
        "flash_mla_sparse_fwd": ("q", "kv", "indices", "sm_scale", "d_v"),
        "flash_mla_interface.FlashMLASchedMeta": (),  # before it, metadata were tensors made from lengths
    },
    f"FlashMLA {COMMIT[:7]}, flash_mla/flash_mla_interface.py",
)  # fmt: skip

RANK, ROPE = 512, 64  # of DeepSeek-V2 to V3.2
HALVES = one(torch.bfloat16, torch.float16)

DENSE_DECODE = Function(
    "flash_mla_with_kvcache",
    majors=(9,),
    source=_AT.format("dense_decode.h"),
    limits=(
        Limit("dtype", HALVES),
        Limit("rank", one(RANK)),
        Limit("rope_dim", one(ROPE)),
        Limit("block_size", one(64)),
        Limit("num_heads", Steps(1, 128), source="our own: the models that it is for"),
    ),
    note="The compiled module may lack float16 (FLASH_MLA_DISABLE_FP16).",
)

SPARSE_DECODE = Function(
    "flash_mla_with_kvcache with indices",
    majors=(9, 10),
    source=_AT.format("sparse_decode.h"),
    limits=(
        Limit("dtype", one(torch.bfloat16)),
        Limit("num_heads", Steps(1, 128), source=f"{_AT.format('sparse_decode.h')}: 64 or 128, others are padded"),
    ),
    note="The number of indices must be a multiple of 64 (csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh).",
)

SPARSE_PREFILL = Function(
    "flash_mla_sparse_fwd",
    majors=(9, 10),
    source=_AT.format("sparse_fwd.h"),
    limits=(
        Limit("dtype", one(torch.bfloat16)),
        Limit("rank", one(RANK)),
        Limit("rope_dim", one(ROPE)),
        Limit("num_heads", Steps(1, 128), source=f"{_AT.format('sparse_fwd.h')}: 64 or 128, others are padded"),
    ),
    note="The number of indices must be a multiple of 128 (csrc/sm90/prefill/sparse/phase1.cuh).",
)

ALL = (DENSE_DECODE, SPARSE_DECODE, SPARSE_PREFILL)

INDICES = 128  # numbers of indices are multiples of it
CHUNK = 4096  # queries of a call with indices: its scheduler holds 20 bytes for each in shared memory
HEADS = (64, 128)
