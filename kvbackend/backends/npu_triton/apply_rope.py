from ..cuda_triton import apply_rope as launcher
from . import limits

run = launcher.run


def unsupported(x, **rest):
    yield from launcher.unsupported(x=x, **rest)
    yield from limits.widths(x=x.shape[2])
