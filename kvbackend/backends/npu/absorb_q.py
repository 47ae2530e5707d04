"""torch_npu.npu_transpose_batchmatmul: [T, H, in] x [H, in, out] -> [T, H, out] without a transpose of its own."""

import torch

from .vendor_ops import TRANSPOSE_BATCHMATMUL as VENDOR

HEADS_SECOND = [1, 0, 2]  # of [T, H, dims], in and out


def unsupported(q_nope, w_uk, **_):
    yield from refuse("q_nope", q_nope, "w_uk", w_uk)


def run(q_nope, w_uk):
    return multiply(q_nope, w_uk)


def refuse(name, x, w_name, w):
    """Why the vendor op cannot multiply x [T, H, in] by w [H, in, out]."""
    yield from VENDOR.missing()
    heads, inputs, outputs = w.shape
    yield from VENDOR.refuse("dtype", x.dtype, f"{name} is", "convert it and the weights")
    yield from VENDOR.refuse("num_heads", heads, "heads are", "split them over devices")
    yield from VENDOR.refuse("inputs", inputs, f"{name}'s dims are", "use the reference for this model")
    yield from VENDOR.refuse("outputs", outputs, f"{w_name}'s outputs are", "use the reference for this model")
    yield from VENDOR.refuse("heads_by_inputs", heads * inputs, f"heads x dims of {name} are", "split the heads")
    if not w.is_contiguous():
        yield f"{w_name} is strided; {VENDOR.name} takes dense weights ({VENDOR.source}): make it contiguous once"


def multiply(x, w):
    import torch_npu

    if x.shape[0] == 0:
        return torch.empty(0, w.shape[0], w.shape[2], dtype=x.dtype, device=x.device)
    return torch_npu.npu_transpose_batchmatmul(x.contiguous(), w, perm_x1=HEADS_SECOND, perm_y=HEADS_SECOND)
