"""Huawei Ascend NPUs through torch_npu: one call of torch_npu for each op, or a few where no fused one exists.

DeepSeek-V4's attention and its indexer of compressed keys are called in CANN's own package, cann_ops_transformer. Block
copies, which neither has, are in our own library, csrc/npu.

Which products, dtypes and sizes each vendor op takes stands in `vendor_ops.py`, with sources; the predicates are
derived from there. What has been proved, and that nothing has run on an NPU yet, stands in docs/ascend.md.
"""

from __future__ import annotations

from collections.abc import Iterator

DEVICE = "npu"
ORDER = 100
EVIDENCE = "call-verified on torch_npu 2.13.0, not executed on an NPU"
EVIDENCE_OF = {
    "shared_kv_attention": "translated, not executed: signature from ops-transformer 9.1.0 and master 57781440",
}

# Why an op has no module here, and where that was read; its reference, which is plain torch, runs on the NPU.
_SCHEMAS = "schemas of the torch_npu wheels 2.9.0 to 2.14.0"
_DOCUMENTED = "op-plugin documentation of 26.1.0"
_PLAIN = f"torch_npu has no fused op for it ({_SCHEMAS}); its reference is the composition of torch ops"
_BITS = "its codes must match to the bit, and the documentation states neither"
WITHOUT = {
    "accumulate_scores": f"no torch_npu attention returns probabilities ({_DOCUMENTED})",
    "candidate_blocks": _PLAIN,
    "compact_cache": _PLAIN,
    "compress_kv": f"torch_npu has no compressor ({_SCHEMAS}); CANN's projects the tokens itself, and neither norms "
    "nor rotates what it pools (ops-transformer master 57781440, compressor)",
    "dequantize_kv": f"{_BITS} the order of roundings of npu_anti_mx_quant nor that of npu_anti_quant ({_DOCUMENTED})",
    "indexer_logits": f"npu_lightning_indexer returns positions; values for training and dense keys ({_DOCUMENTED})",
    "page_logits": _PLAIN,
    "quantize_kv": f"{_BITS} how npu_dynamic_quant and npu_dynamic_mx_quant round nor what becomes of NaN and inf "
    f"({_DOCUMENTED})",
    "select_tokens": _PLAIN,
    "sparse_attention": f"no torch_npu attention takes positions for each kv head ({_SCHEMAS})",
    "token_logits": _PLAIN,
    "topk_indices": f"no torch_npu top-k says which of equal scores it takes ({_DOCUMENTED}); the op's rule is the "
    f"lowest position, which its reference's stable sort keeps",
    "transcode": _PLAIN,
}


def missing() -> Iterator[str]:
    """Why no NPU can be used in this process."""
    from .target import found

    yield from found().reasons
