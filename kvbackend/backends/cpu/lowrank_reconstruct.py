"""As absorb_q: csrc/cpu/absorb_q.cpp for few tokens, torch.bmm for many."""

from ... import native
from . import per_head, takes


def unsupported(z, **_):
    yield from native.missing(per_head.op, "cpu")
    yield from takes.floats(z=z)


def run(z, basis):
    return per_head.project(z, basis)
