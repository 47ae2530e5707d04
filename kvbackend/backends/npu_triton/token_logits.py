from ..cuda_triton import token_logits as launcher
from . import limits

run = launcher.run


def unsupported(q, kv_format, **rest):
    yield from launcher.unsupported(q=q, kv_format=kv_format, **rest)
    yield from limits.packed_heads(kv_format, q=q.shape[2])
