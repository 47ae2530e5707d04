"""Runs the aclnn calls that real torch_npu makes, on host memory: strict where documented, ours in what they compute.

Each operator is a function of the decoded arguments, in the order of its aclnn prototype. Vendor ops go to
`tests/npu/vendor.py`; torch's own ops, which adapters use around them, are computed by torch on the CPU. An operator
that is not listed here fails with 561000, so nothing passes in silence.
"""

from __future__ import annotations

import ctypes
import json
import struct
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu import vendor

DTYPES = {
    0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16, 9: torch.int64,
    11: torch.float64, 12: torch.bool, 27: torch.bfloat16, 35: torch.float8_e5m2, 36: torch.float8_e4m3fn,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
UNKNOWN, FAILED, OK = 561000, 561001, 0

Operator = Callable[[list[Any], list[float]], None]
OPERATORS: dict[str, Operator] = {}
calls: list[tuple[str, dict[str, Any]]] = []  # what was checked, in order
problems: list[str] = []


def operator(name: str) -> Callable[[Operator], Operator]:
    def keep(function: Operator) -> Operator:
        OPERATORS[name] = function
        return function

    return keep


def tensor(record: Any) -> Tensor | None:
    """The memory of an aclTensor as a CPU tensor."""
    if not isinstance(record, dict) or "shape" not in record:
        return None
    dtype, shape, strides = DTYPES[record["dtype"]], record["shape"], record["strides"]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    address = record["data"] + record["offset"] * dtype.itemsize
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def value(record: Any) -> Any:
    """A tensor, list, number or text. A scalar is a tensor without dims, and so differs from a null pointer, 0."""
    if not isinstance(record, dict):
        return record
    if "shape" in record:
        return tensor(record)
    if "scalar" in record:
        layout = {0: "f", 3: "i", 9: "q", 11: "d", 12: "?"}[record["dtype"]]
        number = struct.unpack_from(f"<{layout}", bytes.fromhex(record["scalar"]))[0]
        return torch.tensor(number, dtype=DTYPES[record["dtype"]])
    if "tensors" in record:
        return [tensor(item) for item in record["tensors"]]
    return record.get("integers", record.get("floats"))


def _check(name: bytes, arguments: bytes) -> int:
    calls.append((name.decode(), json.loads(arguments)))
    return OK if name.decode() in OPERATORS else _problem(f"no operator {name.decode()}: {arguments.decode()}", UNKNOWN)


def _launch(name: bytes, arguments: bytes) -> int:
    call = json.loads(arguments)
    try:
        OPERATORS[name.decode()]([value(record) for record in call["arguments"]], call["floats"])
    except vendor.RejectedError as error:
        return _problem(f"{name.decode()}: {error}", vendor.INVALID)
    except Exception:
        return _problem(f"{name.decode()}: {traceback.format_exc()}", FAILED)
    return OK


def _problem(what: str, code: int) -> int:
    problems.append(what)
    print(what)  # pytest shows it beside the error
    return code


_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
_hooks = _HOOK(_check), _HOOK(_launch)  # kept alive


def install() -> None:
    """Let libopapi.so call this module."""
    ctypes.CDLL("libopapi.so").ascend_stub_set_hooks(*_hooks)


# ------------------------------------------------------------------------------------------------------- vendor ops


def put(target: Tensor, result: Tensor) -> None:
    """Write a result into the memory of an output."""
    assert target.shape == result.shape, (target.shape, result.shape)
    target.copy_(result)


def optional(argument: Any) -> Any:
    """A null pointer is no tensor."""
    return None if isinstance(argument, int) and argument == 0 else argument


@operator("aclnnScatterPaKvCache")
def _(a, f):
    key, key_cache, slots, values, value_cache, lens, offsets, seq_lens, cache_mode = a[:9]
    extra = map(optional, (lens, offsets, seq_lens))
    vendor.npu_scatter_pa_kv_cache(key, values, key_cache, value_cache, slots, *extra, cache_mode)


@operator("aclnnScatterPaCache")
def _(a, f):
    key, cache, slots, lens, offsets, seq_lens, cache_mode = a
    vendor.need(cache_mode == "Norm", cache_mode)
    vendor.npu_scatter_pa_cache(key, slots, *map(optional, (lens, offsets, seq_lens)), cache)


@operator("aclnnGatherPaKvCache")
def _(a, f):
    key_cache, value_cache, table, lens, key, values, offset, cache_mode, is_cumsum = a
    vendor.need(cache_mode == "Norm", cache_mode)
    vendor.npu_gather_pa_kv_cache(key_cache, value_cache, table, lens, key, values, optional(offset), bool(is_cumsum))


def fused_infer(a: list[Any], f: list[float]) -> None:
    """V4 and V5 differ by two arguments before the number of heads."""
    layout = next(i for i in range(29, 40) if isinstance(a[i], str))
    heads, before, after = a[layout - 3 : layout]
    kv_heads, sparse_mode, inner_precise, block_size, _, with_lse = a[layout + 1 : layout + 7]
    used = {0, 1, 2, 4, 5, 6, 14, 24, 25, 28}
    vendor.need(all(optional(a[i]) is None for i in range(29) if i not in used), "an argument that is not modelled")
    out, lse = vendor.npu_fused_infer_attention_score_v2(
        a[0], a[1][0], a[2][0], optional(a[24]), optional(a[25]), optional(a[4]), a[5], a[6], a[14], optional(a[28]),
        heads, kv_heads, f[0], a[layout], sparse_mode, block_size, bool(with_lse), before, after, inner_precise,
    )  # fmt: skip
    put(a[-2], out)
    if with_lse:
        put(a[-1], lse)


operator("aclnnFusedInferAttentionScoreV4")(fused_infer)
operator("aclnnFusedInferAttentionScoreV5")(fused_infer)


@operator("aclnnSparseFlashAttention")
def _(a, f):
    q, k, v, indices, table, ends, lens, q_rope, k_rope, block, layout_q, layout_kv, sparse, before, after, mode = a[
        :16
    ]
    out, *_ = vendor.npu_sparse_flash_attention(
        q, k, v, indices, f[0], table, ends, lens, q_rope, k_rope, block, layout_q, layout_kv, sparse, mode,
        return_softmax_lse=bool(a[16]), pre_tokens=before, next_tokens=after,
    )  # fmt: skip
    put(a[17], out)


@operator("aclnnKvQuantSparseFlashAttention")
def _(a, f):
    q, k, v, indices, k_scale, v_scale, table, ends, lens, k_mode, v_mode, block, layout_q, layout_kv, sparse = a[:15]
    before, after, mode, repo, tile, rope_dim, target = a[15:]
    out = vendor.npu_kv_quant_sparse_flash_attention(
        q, k, v, indices, f[0], k_mode, v_mode, table, ends, lens, block, layout_q, layout_kv, sparse, mode, repo, tile,
        rope_dim, optional(k_scale), optional(v_scale), pre_tokens=before, next_tokens=after,
    )  # fmt: skip
    put(target, out)


@operator("aclnnLightningIndexer")
def _(a, f):
    q, k, weights, ends, lens, table, layout_q, layout_k, count, sparse, before, after, with_values, found, _ = a
    result, _ = vendor.npu_lightning_indexer(
        q, k, weights, ends, lens, table, layout_q, layout_k, count, sparse, bool(with_values), pre_tokens=before,
        next_tokens=after,
    )  # fmt: skip
    put(found, result)


@operator("aclnnTransposeBatchMatMul")
def _(a, f):
    x, weight, bias, scale, perm_x1, perm_x2, perm_y, _, split, out = a
    put(out, vendor.npu_transpose_batchmatmul(
        x, weight, optional(bias), optional(scale), perm_x1, perm_x2, perm_y, split))  # fmt: skip


@operator("aclnnAttentionUpdate")
def _(a, f):
    lses, outs, update_type, out, lse = a
    result, result_lse = vendor.npu_attention_update(lses, outs, update_type)
    put(out, result)
    if update_type == 1:
        put(lse, result_lse)


@operator("aclnnRmsNorm")
def _(a, f):
    out, rstd = vendor.npu_rms_norm(a[0], a[1], f[0])
    put(a[2], out)
    put(a[3], rstd)


@operator("aclnnRotaryPositionEmbeddingV2")
def _(a, f):
    x, cos, sin, mode, rotate, out = a
    put(out, vendor.npu_rotary_mul(x, cos, sin, ("half", "interleave")[mode], optional(rotate)))
