"""Products of each head with its own weights: when our kernel takes them, and torch's way for the rest.

Measured on 2026-11-29 on an Intel Xeon with AMX (family 6, model 207), torch 2.13, one thread, in milliseconds of CPU
time: 8 heads of W_UV [128, 512] in bfloat16, as a slice of kv_b_proj (our kernel's row) and dense.

    tokens                        1      4      8      16     32
    our kernel                    0.064  0.059  0.098  0.168  0.321
    torch.bmm, dense weights      0.084  0.085  0.089  0.110  0.162
    torch.bmm, weights strided    0.84   0.88   0.90   0.91   1.00

In float32 torch.bmm was faster or level, but for W_UV at 16 tokens (0.39 to our 0.25).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import native
from ...ops import registry

op = registry["absorb_q"]  # whose kernel this is
kernel = native.kernel(op)

FEW_TOKENS = 4
FEW_TOKENS_STRIDED = 16  # torch copies strided weights first


def is_for_kernel(x: Tensor, w: Tensor) -> bool:
    """Whether our kernel is the faster one for x [T, H, inputs]."""
    return x.dtype is not torch.float32 and x.shape[0] <= (FEW_TOKENS if w.is_contiguous() else FEW_TOKENS_STRIDED)


def dense(w: Tensor) -> Tensor:
    """Weights as torch.bmm reads them fast: with strided 16-bit ones it took up to 2.4 times as long."""
    return w if w.dtype is torch.float32 else w.contiguous()


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x [T, H, inputs] times w [H, inputs, outputs]: [T, H, outputs]."""
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1).contiguous()


def project(x: Tensor, w: Tensor) -> Tensor:
    """The same in the faster of the two ways."""
    return kernel(x, w) if is_for_kernel(x, w) else multiply(x, dense(w))
