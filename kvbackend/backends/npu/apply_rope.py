"""torch_npu.npu_rotary_mul; not npu_interleave_rope, which returns its pairs half-split and does not exist on 950."""

import torch

from . import rotary
from .vendor_ops import ROTARY_MUL as VENDOR


def unsupported(cos_sin, **_):
    yield from VENDOR.missing()
    yield from VENDOR.refuse("rotary_dim", cos_sin.shape[1], "cos_sin's dims are", "use the reference for this model")


def run(x, positions, cos_sin, interleaved, trailing, inverse):
    rotary_dim, head_dim = cos_sin.shape[1], x.shape[2]
    first = head_dim - rotary_dim if trailing else 0
    before, rotated, after = x.split((first, rotary_dim, head_dim - first - rotary_dim), -1)
    return torch.cat((before, rotary.turn(rotated, positions, cos_sin, interleaved, inverse), after), -1).contiguous()
