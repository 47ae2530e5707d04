from ..cuda_triton import concat_and_cache_mla as launcher
from . import limits

run = launcher.run


def unsupported(ckv, kpe, **rest):
    yield from launcher.unsupported(ckv=ckv, kpe=kpe, **rest)
    yield from limits.widths(ckv=ckv.shape[1], kpe=kpe.shape[1])
