"""The vendor ops that this backend calls: on which products they exist and what they take. Data with sources.

Products: 910B (A2), 910_93 (A3), 950PR and 950DT (A5). CANN versions pair with torch_npu's products 7.2.0 (8.3.RC1),
7.3.0 (8.5.0), 26.0.0 (9.0.0) and 26.1.0 (9.1.0). Ascend 950DT is listed from CANN 9.1.0 on (TorchNPU 26.1.0 release
notes). Snapshots read: op-plugin master 517f2e7d (2026-08-21), ops-transformer and ops-nn branches 8.5.0, 9.0.0, 9.1.0
and master (2026-08-21), torch_npu wheels 2.9.0 to 2.14.0. Nothing here was observed on a device.

The ops of cann_ops_transformer are documented twice: in branch 9.1.0, for A2 and A3 alone, and in master, which has 950
too and calls itself 9.1.0 still. So 950 is taken to need the release after it, 9.2.0, and where the two differ on A2
and A3 the limits here are what both allow.
"""

from __future__ import annotations

import torch

from ..limits import Either, Steps, one
from . import cann_ops
from .limits import Limit, VendorOp
from .target import A2_A3, A5

HALVES = one(torch.float16, torch.bfloat16)
FLOATS = one(torch.float16, torch.bfloat16, torch.float32)
POWERS = one(1, 2, 4, 8, 16, 32, 64, 128)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CODES_A5 = (torch.float32, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, *FP8)

_OPS_TRANSFORMER = "CANN ops-transformer, {}"
_OPS_NN = "CANN ops-nn, {}"


def _cann(a2_a3: str, a5: str) -> dict[str, str]:
    return {**dict.fromkeys(A2_A3, a2_a3), "950PR": a5, "950DT": max(a5, "9.1.0")}


SCATTER_PA_KV_CACHE = VendorOp(
    "npu_scatter_pa_kv_cache",
    aclnn=("aclnnScatterPaKvCache",),
    cann=_cann("8.3.RC1", "9.0.0"),
    train="2026-04",
    train_why="cache_mode came with 26.0.0; before, the wrapper wrote fractal NZ pages",
    source=_OPS_TRANSFORMER.format("aclnnScatterPaKvCache"),
    limits=(
        Limit("dtype", one(torch.float16, torch.bfloat16, torch.int8), A2_A3),
        Limit("dtype", one(torch.float16, torch.bfloat16, torch.int8, *CODES_A5), A5),
    ),
    note="Slot -1 must skip the row: not in the documentation, asserted by vllm-ascend's test of this op on one card.",
)

SCATTER_PA_CACHE = VendorOp(
    "npu_scatter_pa_cache.value",
    aclnn=("aclnnScatterPaCache",),
    cann={"950PR": "9.0.0", "950DT": "9.1.0"},
    train="2026-04",
    train_why="the op came with 26.0.0",
    source=_OPS_TRANSFORMER.format("scatter_pa_cache README"),
    limits=(Limit("dtype", one(torch.float16, torch.bfloat16, torch.int8, *CODES_A5), A5),),
    note="Slot -1 as for npu_scatter_pa_kv_cache.",
)

GATHER_PA_KV_CACHE = VendorOp(
    "npu_gather_pa_kv_cache",
    aclnn=("aclnnGatherPaKvCache",),
    cann=_cann("9.0.0", "9.0.0"),
    train="2026-04",
    train_why="the op came with 26.0.0",
    source=_OPS_TRANSFORMER.format("aclnnGatherPaKvCache"),
    limits=(
        Limit("dtype", one(torch.float16, torch.bfloat16, torch.int8), A2_A3),
        Limit("dtype", one(torch.float16, torch.bfloat16, torch.int8, *CODES_A5), A5),
        Limit("token_bytes", Steps(1, 148 * 1024)),
    ),
    note="seq_offset counts in whole blocks (op-plugin's test of the op), so it is not used.",
)

FUSED_INFER_ATTENTION = VendorOp(
    "npu_fused_infer_attention_score_v2",
    aclnn=("aclnnFusedInferAttentionScoreV4", "aclnnFusedInferAttentionScoreV5"),  # V5 on 950
    cann=_cann("8.3.RC1", "9.0.0"),
    source=_OPS_TRANSFORMER.format("aclnnFusedInferAttentionScoreV4 and V5"),
    limits=(
        Limit("dtype", HALVES),
        Limit("head_dim", one(64, 128, 192), source="ops-transformer, TND; vllm-ascend PR #9632"),
        Limit("num_heads", Steps(1, 256)),
        Limit("group", Steps(1, 64), A2_A3),
        Limit("group", Steps(1, 256), A5),
        Limit("row_width", Steps(1, 65535)),
        Limit("block_size", Steps(128, 512), A2_A3),
        Limit("block_size", Steps(128, 1024), A5),
        Limit("block_size_64_128", Steps(128, 512), A2_A3),
        Limit("block_size_64_128", Steps(16, 1024), A5),
        Limit("batch", Steps(1, 4096), source="ops-transformer, TND"),
        Limit("sink_dtype", one(torch.bfloat16), A2_A3),
        Limit("sink_dtype", HALVES, A5),
        Limit("mla_rank", one(512)),
        Limit("mla_rope_dim", one(64)),
        Limit("mla_heads", POWERS, A2_A3),
        Limit("mla_heads", Steps(1, 256), A5),
        Limit("mla_block_size", Steps(16, 1024)),
    ),
    note="Lengths are host integers, so a call waits for the device once and cannot be captured in a graph.",
)

SPARSE_FLASH_ATTENTION = VendorOp(
    "npu_sparse_flash_attention",
    aclnn=("aclnnSparseFlashAttention",),
    cann=_cann("8.5.0", "9.1.0"),
    source=_OPS_TRANSFORMER.format("sparse_flash_attention README"),
    limits=(
        Limit("dtype", HALVES),
        Limit("rank", one(512)),
        Limit("rope_dim", one(64)),
        Limit("num_heads", POWERS, A2_A3),
        Limit("num_heads", Steps(1, 128), A5),
        Limit("block_size", Steps(16, 1024)),
    ),
)

KV_QUANT_SPARSE_FLASH_ATTENTION = VendorOp(
    "npu_kv_quant_sparse_flash_attention",
    aclnn=("aclnnKvQuantSparseFlashAttention",),
    cann={"950PR": "9.1.0", "950DT": "9.1.0"},  # with fp8 rows; A2 and A3 read int8 ones
    source=_OPS_TRANSFORMER.format("kv_quant_sparse_flash_attention README"),
    limits=(
        Limit("dtype", HALVES),
        Limit("num_heads", one(1, 2, 4, 8, 16, 32, 48, 64, 128)),
        Limit("block_size", Steps(16, 1024)),
    ),
)

LIGHTNING_INDEXER = VendorOp(
    "npu_lightning_indexer",
    aclnn=("aclnnLightningIndexer",),
    cann=_cann("8.5.0", "9.1.0"),
    source=_OPS_TRANSFORMER.format("lightning_indexer README"),
    limits=(
        Limit("dtype", HALVES),
        Limit("weights_dtype", FLOATS, A2_A3),
        Limit("weights_dtype", HALVES, A5),
        Limit("dim", one(128)),
        Limit("num_heads", Steps(1, 64), A2_A3),
        Limit("num_heads", one(8, 16, 24, 32, 64), A5),
        Limit("block_size", Steps(16, 1024)),
        Limit("k", Either(Steps(1, 2048), one(3072, 4096, 5120, 6144, 7168, 8192))),
    ),
    note="Which of equal scores it takes is not documented; the op's rule is the lowest position.",
)

TRANSPOSE_BATCHMATMUL = VendorOp(
    "npu_transpose_batchmatmul",
    aclnn=("aclnnTransposeBatchMatMul",),
    cann=_cann("8.2.RC1", "8.5.0"),
    source=_OPS_NN.format("aclnnTransposeBatchMatMul; op-plugin documentation"),
    limits=(
        Limit("dtype", FLOATS),
        Limit("num_heads", Steps(1, 65535)),
        Limit("inputs", Steps(16, 65535)),
        Limit("outputs", Steps(16, 65535)),
        Limit("heads_by_inputs", Steps(1, 65535), A2_A3),
        Limit("heads_by_inputs", Steps(1, 2**31 - 1), A5, source="no limit found"),
    ),
)

ATTENTION_UPDATE = VendorOp(
    "npu_attention_update",
    aclnn=("aclnnAttentionUpdate",),
    cann={"910B": "8.3.RC1", "910_93": "8.3.RC1", "950DT": "9.1.0"},
    source="op-plugin documentation of npu_attention_update, which names 950DT and not 950PR",
    limits=(
        Limit("dtype", FLOATS),
        Limit("parts", Steps(1, 16)),
        Limit("value_dim", Steps(8, 512)),
    ),
)

RMS_NORM = VendorOp(
    "npu_rms_norm",
    aclnn=("aclnnRmsNorm",),
    cann=_cann("", "9.0.0"),
    source=_OPS_NN.format("rms_norm README"),
    limits=(Limit("dtype", FLOATS),),
)

ROTARY_MUL = VendorOp(
    "npu_rotary_mul",
    aclnn=("aclnnRotaryPositionEmbeddingV2",),
    cann=_cann("", "8.5.0"),
    source=_OPS_TRANSFORMER.format("rotary_position_embedding README"),
    limits=(Limit("rotary_dim", Steps(2, 894)),),
    note="Called in float32, the dtype in which the op's products and sums are specified.",
)

_V4 = f"{cann_ops.PACKAGE}.{{}}, documented in ops-transformer 9.1.0 and master 57781440"

SPARSE_FLASH_MLA = VendorOp(
    f"{cann_ops.PACKAGE}.sparse_flash_mla",
    aclnn=("aclnnSparseFlashMla", "aclnnSparseFlashMlaMetadata"),
    cann=_cann("9.1.0", "9.2.0"),
    source=_V4.format("sparse_flash_mla"),
    limits=(
        Limit("dtype", HALVES),
        Limit("dim", one(512)),
        Limit("num_heads", POWERS, A2_A3),
        Limit("num_heads", Steps(1, 128), A5),
        Limit("block_size", Steps(16, 1024), A2_A3),
        Limit("block_size", Steps(1, 1024), A5),
        Limit("window", one(128), A2_A3),
        Limit("window", Steps(1, 2**31 - 1), A5, source="no limit found"),
        Limit("ratio_chosen", one(4), A2_A3),
        Limit("ratio_chosen", Steps(1, 128), A5),
        Limit("ratio_all", one(128), A2_A3),
        Limit("ratio_all", Steps(1, 128), A5),
        Limit("topk", Steps(1, 1024), A2_A3),
        Limit("topk", Steps(1, 2**31 - 1), A5, source="no limit found"),
    ),
    note="A2 and A3 take lists of 512 or 1024 indices, to which the adapter fills them up with -1. The documentation's "
    "lse leaves the sinks out, that of the tests beside the op counts them.",
)

MIXED_QUANT_SPARSE_FLASH_MLA = VendorOp(
    f"{cann_ops.PACKAGE}.mixed_quant_sparse_flash_mla",
    aclnn=("aclnnMixedQuantSparseFlashMla", "aclnnMixedQuantSparseFlashMlaMetadata"),
    cann={"950PR": "9.2.0", "950DT": "9.2.0"},
    source=f"{cann_ops.PACKAGE}.mixed_quant_sparse_flash_mla, documented in ops-transformer master 57781440",
    limits=(
        Limit("dtype", one(torch.bfloat16)),
        Limit("dim", one(512)),
        Limit("num_heads", Steps(1, 128)),
        Limit("block_size", Steps(1, 1024)),
        Limit("ratio_chosen", Steps(1, 128)),
        Limit("ratio_all", Steps(1, 128)),
    ),
)

LIGHTNING_INDEXER_V2 = VendorOp(
    f"{cann_ops.PACKAGE}.lightning_indexer",
    aclnn=("aclnnLightningIndexerV2", "aclnnLightningIndexerV2Metadata"),
    cann=_cann("9.1.0", "9.2.0"),
    source=_V4.format("lightning_indexer"),
    limits=(
        Limit("dtype", HALVES),
        Limit("dim", one(128)),
        Limit("num_heads", one(64), A2_A3),
        Limit("num_heads", Steps(1, 64), A5),
        Limit("block_size", Steps(16, 1024)),
        Limit("k", Steps(1, 2048), A2_A3),
        Limit("k", Steps(1, 8192), A5),
        Limit("ratio", one(1, 2, 4, 8, 16, 32, 64, 128), A2_A3),
        Limit("ratio", Steps(1, 128), A5),
        Limit("batch", Steps(1, 65535)),
    ),
    note="As for npu_lightning_indexer, which of equal scores it takes is not documented.",
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, VendorOp))
