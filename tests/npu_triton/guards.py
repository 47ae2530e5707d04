"""Calls of each op that has a limit here, of heads or rows of a given number of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvbackend import backends
from kvbackend.backends.npu_triton.limits import WIDEST, WIDEST_PACKED
from kvbackend.ops import registry
from tests.cuda_triton import shapes

NPU_TRITON = backends.registered()["npu_triton"]
PACKED = "nvfp4"  # 4 bits, and groups of 16


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class PackedHeads(shapes.Shapes):
    """Calls over heads of `dim` numbers of 4 bits."""

    dim: int = 128

    def paged(self, queries: int, kv_format: str = PACKED, **other: Any) -> dict[str, Any]:
        return super().paged(queries, PACKED, **other | dict(dim=self.dim, block_size=32))


def _heads(dim: int) -> PackedHeads:
    return PackedHeads(num_seqs=2, length=64, prefill=8, topk=16, tokens=3, dim=dim)


def _rows(number: int) -> torch.Tensor:
    return meta(4, 2, number)


SLOTS = meta(4, dtype=torch.int64)
# op -> the largest number that it takes, and a call of some number
GUARDED: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "apply_rope": (
        WIDEST,
        lambda n: dict(x=_rows(n), positions=SLOTS, cos_sin=meta(8, n, dtype=torch.float32), interleaved=False),
    ),
    "concat_and_cache_mla": (
        WIDEST,
        lambda n: dict(
            ckv=meta(4, 16), kpe=meta(4, n), ckv_cache=meta(3, 4, 16), kpe_cache=meta(3, 4, n), slot_mapping=SLOTS
        ),
    ),
    "dequantize_kv": (
        WIDEST,
        lambda n: dict(
            codes=meta(4, 2, n, dtype=torch.int8), scales=meta(4, 2, dtype=torch.float32), kv_format="int8"
        ),
    ),
    "gather_cache": (
        WIDEST,
        lambda n: dict(
            cache=meta(3, 4, 2, n), block_table=meta(1, 2, dtype=torch.int32), cu_seqlens=meta(2, dtype=torch.int32),
            num_tokens=4,
        ),
    ),
    "merge_attn_states": (WIDEST, lambda n: dict(outs=meta(2, 4, 2, n), lses=meta(2, 4, 2, dtype=torch.float32))),
    "quantize_kv": (WIDEST, lambda n: dict(x=_rows(n), kv_format="int8")),
    "reshape_and_cache": (
        WIDEST,
        lambda n: dict(
            key=_rows(16), value=_rows(n), key_cache=meta(3, 4, 2, 16), value_cache=meta(3, 4, 2, n), slot_mapping=SLOTS
        ),
    ),
    "store_rows": (WIDEST, lambda n: dict(rows=meta(4, n), cache=meta(3, 4, n), slot_mapping=SLOTS)),
    "paged_attention": (WIDEST_PACKED, lambda n: _heads(n).paged(1)),
    "sparse_attention": (WIDEST_PACKED, lambda n: _heads(n).sparse(1)),
    "token_logits": (WIDEST_PACKED, lambda n: _heads(n).looking()),
    "accumulate_scores": (
        WIDEST_PACKED,
        lambda n: {name: value for name, value in _heads(n).scoring(8).items() if not name.startswith("v_")},
    ),
}  # fmt: skip


def refusals(op: str, number: int) -> list[str]:
    """Why a call of an op is not taken on an Ascend 950 and would be on a GPU."""
    call = registry[op].bind((), GUARDED[op][1](number))
    registry[op].validate(call)
    found = NPU_TRITON.adapter(op).unsupported(**registry[op].dispatcher.views(call))
    return [reason for reason in found if "compiled for an Ascend 950 with up to" in reason]


def hold(op: str) -> None:
    """The largest is taken, and 16 more are not."""
    most = GUARDED[op][0]
    assert not refusals(op, most)
    assert refusals(op, most + 16), op
