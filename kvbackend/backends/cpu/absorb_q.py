"""csrc/cpu/absorb_q.cpp for few tokens, torch.bmm for many."""

from ... import native
from . import per_head, takes


def unsupported(q_nope, **_):
    yield from native.missing(per_head.op, "cpu")
    yield from takes.floats(q_nope=q_nope)


def run(q_nope, w_uk):
    return per_head.project(q_nope, w_uk)
