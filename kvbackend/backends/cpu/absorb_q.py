"""csrc/cpu/absorb_q.cpp for few tokens, torch.bmm for many."""

from ... import native
from ...ops import registry
from . import per_head, takes

op = registry["absorb_q"]
kernel = native.kernel(op)


def unsupported(q_nope, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(q_nope=q_nope)


def run(q_nope, w_uk):
    if per_head.is_for_kernel(q_nope, w_uk):
        return kernel(q_nope, w_uk)
    return per_head.multiply(q_nope, per_head.dense(w_uk))
