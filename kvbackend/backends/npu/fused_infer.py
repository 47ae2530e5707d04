"""npu_fused_infer_attention_score_v2 over a varlen batch and a paged cache: what dense and MLA attention share."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...ops import _math
from .host_lengths import Batch

CAUSAL = 3  # sparse_mode "rightDownCausal": queries are the last tokens of their sequences
MASK_SIZE = 2048  # of the compressed mask that this mode wants


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1).to(device)  # 1: not seen


def attend(
    q: Tensor, key: Tensor, value: Tensor, batch: Batch, *, kv_heads: int, block_size: int, softmax_scale: float,
    causal: bool, return_lse: bool, **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, D] over pages key and value [nb, bs, kv_heads * D | Dv]: out [T, H, Dv], lse [T, H] or [0] float32."""
    import torch_npu

    num_tokens, num_heads = q.shape[:2]
    used = batch.num_tokens  # in layout TND the number of rows must be the last of q_ends: vllm-ascend #6524
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        q[:used].contiguous(),
        key,
        value,
        atten_mask=_causal_mask(q.device) if causal else None,
        actual_seq_qlen=batch.q_ends,
        actual_seq_kvlen=batch.kv_lens,  # of each sequence, not a running sum, since the cache is paged
        block_table=batch.block_table,
        num_query_heads=num_heads,
        num_key_value_heads=kv_heads,
        softmax_scale=softmax_scale,
        input_layout="TND",
        sparse_mode=CAUSAL if causal else 0,
        block_size=block_size,
        return_softmax_lse=return_lse,
        **more,
    )
    lse = lse[..., 0] if return_lse else q.new_empty(0, dtype=torch.float32)  # [T, H, 1]
    if used == num_tokens:
        return out, lse
    nothing, no_lse = _math.nothing_seen(q[used:], out.shape[2], return_lse)  # rows of no sequence
    return torch.cat((out, nothing)), torch.cat((lse, no_lse))
