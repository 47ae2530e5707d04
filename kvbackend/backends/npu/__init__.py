"""Huawei Ascend NPUs through torch_npu: one call of torch_npu for each op, or a few where no fused one exists.

Which products, dtypes and sizes each vendor op takes stands in `vendor_ops.py`, with sources; the predicates are
derived from there. What has been proved, and that nothing has run on an NPU yet, stands in docs/ascend.md.
"""

from __future__ import annotations

from collections.abc import Iterator

DEVICE = "npu"
ORDER = 100

# Why an op has no module here; its reference, which is plain torch, runs on the NPU.
_PLAIN = "torch_npu has no fused op for it, and its reference is a few plain torch ops"
_V4 = (
    "torch_npu has no shared key-value attention; CANN's sparse_flash_mla is in the package cann_ops_transformer "
    "(ops-transformer, python/), which compiles itself against CANN at the first call"
)
_BITS = "its codes must match to the bit, and the op-plugin documentation states neither"
WITHOUT = {
    "accumulate_scores": "no torch_npu attention returns probabilities (op-plugin documentation of 26.1.0)",
    "candidate_blocks": _PLAIN,
    "compact_cache": _PLAIN,
    "compress_kv": _V4.replace("shared key-value attention", "compressor").replace("sparse_flash_mla", "compressor"),
    "copy_blocks": f"{_PLAIN}; the block copies of vllm-ascend are in its own extension",
    "dequantize_kv": f"{_BITS} the order of roundings of npu_anti_mx_quant nor that of npu_anti_quant",
    "indexer_logits": "npu_lightning_indexer returns positions; its return_value is for training and dense keys only",
    "quantize_kv": f"{_BITS} how npu_dynamic_quant and npu_dynamic_mx_quant round nor what becomes of NaN and inf",
    "select_tokens": _PLAIN,
    "shared_kv_attention": _V4,
    "swap_blocks": f"{_PLAIN}; copies between host and device are torch's own",
    "topk_indices": "no torch_npu top-k documents which of equal scores it takes; the op's rule is the lowest position",
    "transcode": _PLAIN,
}


def missing() -> Iterator[str]:
    """Why no NPU can be used in this process."""
    from .target import found

    yield from found().reasons
