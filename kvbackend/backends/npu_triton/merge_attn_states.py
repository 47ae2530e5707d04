from ..cuda_triton import merge_attn_states as launcher
from . import limits

run = launcher.run


def unsupported(outs, **rest):
    yield from launcher.unsupported(outs=outs, **rest)
    yield from limits.widths(outs=outs.shape[3])
