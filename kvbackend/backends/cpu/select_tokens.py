from ... import native
from ...ops import registry
from ...ops.select_tokens import need_sizes
from . import takes

op = registry["select_tokens"]
native_kernel = native.kernel(op)


def unsupported(scores, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(scores=scores)


def run(scores, seq_lens, budget, num_sinks, num_recent, pooling, kernel, budgets):
    need_sizes(budget, num_sinks, num_recent, kernel)
    return native_kernel(scores, seq_lens, budget, num_sinks, num_recent, pooling, kernel, budgets)
