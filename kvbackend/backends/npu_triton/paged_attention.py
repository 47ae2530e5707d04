from ..cuda_triton import paged_attention as launcher
from . import limits

run = launcher.run


def unsupported(q, value_cache, kv_format, **rest):
    yield from launcher.unsupported(q=q, value_cache=value_cache, kv_format=kv_format, **rest)
    yield from limits.packed_heads(kv_format, q=q.shape[2])
