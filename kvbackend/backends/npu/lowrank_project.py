"""As absorb_q."""

from .absorb_q import multiply, refuse


def unsupported(x, projection, **_):
    yield from refuse("x", x, "projection", projection)


def run(x, projection):
    return multiply(x, projection)
