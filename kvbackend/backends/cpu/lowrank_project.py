"""As absorb_q: csrc/cpu/absorb_q.cpp for few tokens, torch.bmm for many."""

from ... import native
from . import per_head, takes


def unsupported(x, **_):
    yield from native.missing(per_head.op, "cpu")
    yield from takes.floats(x=x)


def run(x, projection):
    return per_head.project(x, projection)
