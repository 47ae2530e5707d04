from ..cuda_triton import store_rows as launcher
from . import limits

run = launcher.run


def unsupported(rows, **rest):
    yield from launcher.unsupported(rows=rows, **rest)
    yield from limits.widths(rows=rows.shape[1])
