"""csrc/cpu/mla_project_kv.cpp, whose projection is torch's matmul for many tokens."""

from ... import native
from ...ops import registry
from . import takes

op = registry["mla_project_kv"]
run = native.kernel(op)


def unsupported(hidden, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(hidden=hidden)
