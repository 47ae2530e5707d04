from ..cuda_triton import reshape_and_cache as launcher
from . import limits

run = launcher.run


def unsupported(key, value, **rest):
    yield from launcher.unsupported(key=key, value=value, **rest)
    yield from limits.widths(key=key.shape[2], value=value.shape[2])
