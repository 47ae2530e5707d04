import torch

from ... import native
from ...ops import registry
from . import takes

op = registry["paged_attention"]
run = native.kernel(op)


def unsupported(q, sinks, rope_cos_sin, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q=q)
    if sinks is not None:
        yield from takes.floats(sinks=sinks)
    if rope_cos_sin is not None and rope_cos_sin.dtype not in (torch.float32, q.dtype):
        yield (
            f"rope_cos_sin is {rope_cos_sin.dtype}; the CPU kernel takes torch.float32 or q's {q.dtype}: "
            f"convert the table once"
        )
