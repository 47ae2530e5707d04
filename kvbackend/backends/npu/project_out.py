"""torch.bmm: npu_transpose_batchmatmul documents no transposed weights, and W_UV lies transposed in kv_b_proj."""

import torch

from .vendor_ops import FLOATS


def unsupported(latent, **_):
    if not FLOATS.allows(latent.dtype):
        yield f"latent is {latent.dtype}; torch.bmm on an NPU takes {FLOATS}: convert it"


def run(latent, w_uv):
    return torch.bmm(latent.transpose(0, 1), w_uv.mT).transpose(0, 1).contiguous()
