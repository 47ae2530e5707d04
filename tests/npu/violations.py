"""Every documented limit with values that violate it, and the calls of which it is a property. No pytest here: the
check for a machine with an NPU walks them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvbackend.backends.limits import OneOf
from kvbackend.backends.npu import vendor_ops
from kvbackend.backends.npu.limits import Limit, VendorOp

Sizes = Callable[[Any], dict[str, Any]]


def named(name: str) -> Sizes:
    return lambda value: {name: value}


# (vendor op, limit) -> the ops that it limits, and the sizes of a call with a given value of it
WALK: dict[tuple[str, str], list[tuple[str, Sizes]]] = {
    ("npu_scatter_pa_kv_cache", "dtype"): [
        (op, named("dtype")) for op in ("reshape_and_cache", "concat_and_cache_mla")
    ],
    ("npu_scatter_pa_cache.value", "dtype"): [("store_rows", named("dtype"))],
    ("npu_gather_pa_kv_cache", "dtype"): [("gather_cache", named("dtype"))],
    ("npu_gather_pa_kv_cache", "token_bytes"): [("gather_cache", named("token_bytes"))],
    ("npu_fused_infer_attention_score_v2", "dtype"): [
        (op, named("dtype")) for op in ("paged_attention", "mla_attention")
    ],
    ("npu_fused_infer_attention_score_v2", "num_heads"): [
        ("paged_attention", lambda value: dict(num_heads=value, kv_heads=value))
    ],
    ("npu_fused_infer_attention_score_v2", "group"): [
        ("paged_attention", lambda value: dict(num_heads=value, kv_heads=1))
    ],
    ("npu_fused_infer_attention_score_v2", "row_width"): [
        ("paged_attention", lambda value: dict(num_heads=-(-value // 64), kv_heads=-(-value // 64), num_blocks=3))
    ],
    ("npu_fused_infer_attention_score_v2", "block_size"): [
        ("paged_attention", lambda value: dict(block_size=value, head_dim=192))
    ],
    ("npu_fused_infer_attention_score_v2", "block_size_64_128"): [("paged_attention", named("block_size"))],
    ("npu_fused_infer_attention_score_v2", "batch"): [
        (op, named("batch")) for op in ("paged_attention", "mla_attention")
    ],
    **{
        ("npu_fused_infer_attention_score_v2", name): [("paged_attention", named(name))]
        for name in ("head_dim", "sink_dtype")
    },
    **{
        ("npu_fused_infer_attention_score_v2", name): [("mla_attention", named(name))]
        for name in ("mla_rank", "mla_rope_dim", "mla_heads", "mla_block_size")
    },
    **{
        ("npu_sparse_flash_attention", name): [("sparse_mla_attention", named(name))]
        for name in ("dtype", "rank", "rope_dim", "num_heads", "block_size")
    },
    **{
        ("npu_kv_quant_sparse_flash_attention", name): [
            ("sparse_mla_attention", lambda value, name=name: {"kv_format": "v32_fp8_656_ascend", name: value})
        ]
        for name in ("dtype", "num_heads", "block_size")
    },
    **{
        ("npu_lightning_indexer", name): [("lightning_indexer", named(name))]
        for name in ("dtype", "weights_dtype", "dim", "num_heads", "block_size", "k")
    },
    **{
        ("npu_transpose_batchmatmul", name): [("absorb_q", named(name))]
        for name in ("dtype", "num_heads", "inputs", "outputs", "heads_by_inputs")
    },
    **{
        ("npu_attention_update", name): [("merge_attn_states", named(name))] for name in ("dtype", "parts", "value_dim")
    },
    **{
        ("cann_ops_transformer.lightning_indexer", name): [
            ("lightning_indexer", lambda value, name=name: {"compress_ratio": 4, "num_heads": 64, name: value})
        ]
        for name in ("dtype", "dim", "num_heads", "block_size", "k", "batch")
    },
    ("cann_ops_transformer.lightning_indexer", "ratio"): [
        ("lightning_indexer", lambda value: dict(num_heads=64, compress_ratio=value))
    ],
    **{
        (f"cann_ops_transformer.{vendor}sparse_flash_mla", name): [
            ("shared_kv_attention", lambda value, name=name, record=record: {"record": record, name: value})
        ]
        for vendor, record in (("", "auto"), ("mixed_quant_", "v4_fp8_608_ascend"))
        for name in ("dtype", "dim", "num_heads", "block_size", "window", "topk")
        if vendor == "" or name not in ("window", "topk")
    },
    **{
        (f"cann_ops_transformer.{vendor}sparse_flash_mla", limit): [
            (
                "shared_kv_attention",
                lambda value, topk=topk, record=record: dict(compress_ratio=value, topk=topk, record=record),
            )
        ]
        for vendor, record in (("", "auto"), ("mixed_quant_", "v4_fp8_608_ascend"))
        for limit, topk in (("ratio_chosen", 6), ("ratio_all", 0))
    },
    ("npu_rms_norm", "dtype"): [("mla_project_kv", named("dtype"))],
    ("npu_rotary_mul", "rotary_dim"): [(op, named("rotary_dim")) for op in ("apply_rope", "mla_project_kv")],
}
TOO_LARGE_FOR_HOST = {"batch", "row_width", "token_bytes", "heads_by_inputs", "num_heads", "inputs", "outputs", "k"}


def violations(limit: Limit) -> Iterator[Any]:
    if isinstance(limit.rule, OneOf) and isinstance(limit.rule.values[0], torch.dtype):
        yield from (dtype for dtype in (torch.float64, torch.float32) if not limit.rule.allows(dtype))
    else:
        yield from limit.rule.violations()


def walk(family: str) -> Iterator[tuple[VendorOp, Limit, Any]]:
    """The violations on a product."""
    for op in vendor_ops.ALL:
        for limit in op.limits:
            if family in op.cann and family in limit.families and limit.source != "no limit found":
                for value in violations(limit):
                    yield op, limit, value
