from ..cuda_triton import gather_cache as launcher
from . import limits

run = launcher.run


def unsupported(cache, **rest):
    yield from launcher.unsupported(cache=cache, **rest)
    yield from limits.widths(cache=cache.shape[-1])
