"""merge_states, whose lse is base 2; empty parts and sinks are ours to handle."""

import torch

from ...facts import fact
from ...ops._math import apply_sinks
from . import conventions
from .vendor import MERGE_STATES as VENDOR

LOWEST = -1e30  # in place of -inf, whose difference from itself would be NaN


def unsupported(outs, **_):
    yield from VENDOR.missing()
    yield from VENDOR.refuse("dtype", outs.dtype, "outs are", "convert them")
    yield from VENDOR.refuse("value_dim", outs.shape[3], "dims of a value are", "use backend 'cuda_triton'")
    if fact("outs.numel() == 0", outs=outs):
        yield f"outs is empty; {VENDOR.name} launches a block for each row: skip the call"


def run(outs, lses, sinks):
    import flashinfer

    empty = lses.isinf()  # +inf is how some libraries mark a part without keys
    parts = outs.masked_fill(empty[..., None], 0).transpose(0, 1).contiguous()  # [T, N, H, Dv]
    lse_parts = conventions.base_2(lses.masked_fill(empty, LOWEST)).transpose(0, 1).contiguous()  # [T, N, H]
    out, lse = flashinfer.cascade.merge_states(v=parts, s=lse_parts)
    nothing = empty.all(0)
    out = out.masked_fill(nothing[..., None], 0)
    lse = conventions.natural(lse).masked_fill(nothing, -torch.inf)
    wrong = lses.isnan().any(0)  # the kernel's maximum may pass over NaN
    out, lse = out.masked_fill(wrong[..., None], torch.nan), lse.masked_fill(wrong, torch.nan)
    if sinks is not None:
        out = apply_sinks(out.float(), lse, sinks).to(outs.dtype)
    return out, lse
