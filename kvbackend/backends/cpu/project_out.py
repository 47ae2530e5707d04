from ... import native
from ...ops import registry
from . import takes

op = registry["project_out"]
run = native.kernel(op)


def unsupported(latent, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(latent=latent)
