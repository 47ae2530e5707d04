"""csrc/cpu/project_out.cpp for few tokens, torch.bmm for many."""

from ... import native
from ...ops import registry
from . import per_head, takes

op = registry["project_out"]
kernel = native.kernel(op)


def unsupported(latent, **_):
    yield from native.missing(op, "cpu")
    yield from takes.floats(latent=latent)


def run(latent, w_uv):
    if per_head.is_for_kernel(latent, w_uv):
        return kernel(latent, w_uv)
    return per_head.multiply(latent, per_head.dense(w_uv).transpose(1, 2))
