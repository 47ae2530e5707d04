"""torch_npu.npu_attention_update, whose lse is the natural logarithm too; empty parts and sinks are ours to handle."""

import torch

from ...facts import fact
from ...ops._math import apply_sinks
from .vendor_ops import ATTENTION_UPDATE as VENDOR

WITH_LSE = 1  # update_type
LOWEST = torch.finfo(torch.float32).min  # in place of -inf, whose difference from itself would be NaN


def unsupported(outs, **_):
    yield from VENDOR.missing()
    if VENDOR.is_here():
        yield from VENDOR.refuse("dtype", outs.dtype, "outs are", "convert them")
        yield from VENDOR.refuse("parts", outs.shape[0], "parts are", "merge some of them first")
        yield from VENDOR.refuse("value_dim", outs.shape[3], "dims of a value are", "use the reference for this model")
    if fact("outs.numel() == 0", outs=outs):
        yield f"outs is empty; {VENDOR.name} documents no empty parts ({VENDOR.source}): skip the call"


def run(outs, lses, sinks):
    import torch_npu

    num_parts, num_tokens, num_heads, value_dim = outs.shape
    empty = lses.isinf()  # +inf is how some libraries mark a part without keys
    lse_parts = lses.masked_fill(empty, LOWEST).flatten(1)  # [N, T * H]
    out_parts = outs.masked_fill(empty[..., None], 0).reshape(num_parts, -1, value_dim)
    out, lse = torch_npu.npu_attention_update(list(lse_parts.unbind(0)), list(out_parts.unbind(0)), WITH_LSE)
    out = out.view(num_tokens, num_heads, value_dim)
    lse = lse.view(num_tokens, num_heads).masked_fill(empty.all(0), -torch.inf)
    if sinks is not None:
        out = apply_sinks(out.float(), lse, sinks)
    return out.to(outs.dtype), lse
