"""Torch's own ops as the fake operator library runs them: by torch on the CPU.

Adapters use a few of them around their vendor calls; a reference that runs on an NPU is made of nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.stub_cann.fake_aclnn import operator, optional, put


def single(register: float) -> float:
    """A float32 argument, which fills half of the register."""
    number: float = struct.unpack("<fI", struct.pack("<d", register))[0]
    return number


def unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    operator(name)(lambda a, f: put(a[1], function(a[0])))


def binary(name: str, function: Callable[[Any, Any], Tensor]) -> None:
    operator(name)(lambda a, f: put(a[2], function(a[0], a[1])))


def scaled(name: str, sign: int) -> None:
    operator(name)(lambda a, f: put(a[3], a[0] + sign * a[2] * a[1]))  # the third argument is alpha


ROUNDINGS = {1: "trunc", 2: "floor"}

unary("aclnnNeg", torch.neg)
unary("aclnnAbs", torch.abs)
unary("aclnnSigmoid", torch.sigmoid)
unary("aclnnExp", torch.exp)
unary("aclnnBitwiseNot", torch.bitwise_not)
unary("aclnnLogicalNot", torch.logical_not)
unary("aclnnTanh", torch.tanh)
unary("aclnnRelu", torch.relu)
unary("aclnnRsqrt", torch.rsqrt)
unary("aclnnRound", torch.round)
unary("aclnnTrunc", torch.trunc)
unary("aclnnSignbit", torch.signbit)
operator("aclnnCast")(lambda a, f: put(a[-1], a[0].to(a[-1].dtype)))
operator("aclnnInplaceCopy")(lambda a, f: put(a[0], a[1].expand(a[0].shape)))
operator("aclnnInplaceZero")(lambda a, f: a[0].zero_())
operator("aclnnInplaceOne")(lambda a, f: a[0].fill_(1))
operator("aclnnInplaceFillScalar")(lambda a, f: a[0].fill_(a[1]))
operator("aclnnInplaceMaskedFillScalar")(lambda a, f: a[0].masked_fill_(a[1], a[2]))
binary("aclnnMuls", torch.mul)
binary("aclnnMul", torch.mul)
binary("aclnnDivs", torch.div)
binary("aclnnDiv", torch.div)
binary("aclnnFloorDivides", torch.floor_divide)
binary("aclnnRemainderTensorScalar", torch.remainder)
binary("aclnnLtTensor", torch.lt)
binary("aclnnLtScalar", torch.lt)
binary("aclnnLeTensor", torch.le)
binary("aclnnLeScalar", torch.le)
binary("aclnnGeScalar", torch.ge)
binary("aclnnGeTensor", torch.ge)
binary("aclnnGtScalar", torch.gt)
binary("aclnnGtTensor", torch.gt)
binary("aclnnEqScalar", torch.eq)
binary("aclnnEqTensor", torch.eq)
binary("aclnnNeScalar", torch.ne)
binary("aclnnNeTensor", torch.ne)
binary("aclnnBitwiseAndTensor", torch.bitwise_and)
binary("aclnnBitwiseOrTensor", torch.bitwise_or)
binary("aclnnBitwiseAndScalar", torch.bitwise_and)
binary("aclnnLeftShifts", torch.bitwise_left_shift)
binary("aclnnRightShift", torch.bitwise_right_shift)
binary("aclnnMaximum", torch.maximum)
binary("aclnnLogAddExp", torch.logaddexp)
operator("aclnnRsubs")(lambda a, f: put(a[3], a[1] - a[2] * a[0]))
operator("aclnnMean")(lambda a, f: put(a[4], a[0].mean(tuple(a[1]), bool(a[2]), dtype=a[4].dtype)))
operator("aclnnAmax")(lambda a, f: put(a[3], a[0].amax(tuple(a[1]), bool(a[2]))))
operator("aclnnAmin")(lambda a, f: put(a[3], a[0].amin(tuple(a[1]), bool(a[2]))))
operator("aclnnIndexPutImpl")(lambda a, f: a[0].index_put_(tuple(a[1]), a[2], bool(a[3])))
operator("aclnnScatterValue")(lambda a, f: put(a[5], a[0].scatter(a[1], a[2].long(), a[3].item())))
operator("aclnnDivMods")(lambda a, f: put(a[3], torch.div(a[0], a[1], rounding_mode=ROUNDINGS[a[2]])))
operator("aclnnReduceSum")(lambda a, f: put(a[4], a[0].sum(tuple(a[1]), bool(a[2]), dtype=a[4].dtype)))
operator("aclnnArgMax")(lambda a, f: put(a[3], a[0].argmax(a[1], bool(a[2]))))
operator("aclnnCumsum")(lambda a, f: put(a[3], a[0].cumsum(a[1], dtype=a[3].dtype)))
operator("aclnnRepeatInterleaveIntWithDim")(lambda a, f: put(a[4], a[0].repeat_interleave(a[1], a[2])))
operator("aclnnNanToNum")(lambda a, f: put(a[1], a[0].nan_to_num(*map(single, f[:3]))))
operator("aclnnInplaceScatter")(lambda a, f: a[0].scatter_(a[1], a[2].long(), a[3]))
operator("aclnnConstantPadNd")(lambda a, f: put(a[3], torch.nn.functional.pad(a[0], tuple(a[1]), value=a[2].item())))
binary("aclnnPowTensorScalar", torch.pow)
operator("aclnnInplaceAdd")(lambda a, f: a[0].add_(a[2] * a[1]))
scaled("aclnnAdd", 1)
scaled("aclnnAdds", 1)
scaled("aclnnSub", -1)
scaled("aclnnSubs", -1)
operator("aclnnClamp")(lambda a, f: put(a[3], a[0].clamp(*map(optional, a[1:3]))))
operator("aclnnArange")(lambda a, f: put(a[3], torch.arange(*(number.item() for number in a[:3]), dtype=a[3].dtype)))
operator("aclnnRepeatInterleaveInt")(lambda a, f: put(a[3], a[0].repeat_interleave(a[1])))
operator("aclnnAny")(lambda a, f: put(a[3], a[0].any(tuple(a[1]), bool(a[2])) if a[0].dim() else a[0].any()))
operator("aclnnAll")(lambda a, f: put(a[3], a[0].all(tuple(a[1]), bool(a[2])) if a[0].dim() else a[0].all()))
operator("aclnnCat")(lambda a, f: put(a[2], torch.cat(a[0], a[1])))
operator("aclnnStack")(lambda a, f: put(a[2], torch.stack(a[0], a[1])))
operator("aclnnSWhere")(lambda a, f: put(a[3], torch.where(a[0], a[1], a[2])))
operator("aclnnIndexSelect")(lambda a, f: put(a[3], a[0].index_select(a[1], a[2])))
operator("aclnnGather")(lambda a, f: put(a[3], a[0].gather(a[1], a[2].long())))
operator("aclnnIndex")(lambda a, f: put(a[2], a[0][tuple(a[1])]))
operator("aclnnSearchSorted")(lambda a, f: put(a[5], torch.searchsorted(a[0], a[1], right=bool(a[3]))))
operator("aclnnLogSumExp")(lambda a, f: put(a[3], a[0].logsumexp(a[1], bool(a[2]))))
operator("aclnnMatmul")(lambda a, f: put(a[2], (a[0].double() @ a[1].double()).to(a[2].dtype)))
operator("aclnnBatchMatMul")(lambda a, f: put(a[2], (a[0].double() @ a[1].double()).to(a[2].dtype)))


@operator("aclnnSort")
def _(a, f):
    values, indices = a[0].sort(dim=a[2], descending=bool(a[3]), stable=bool(a[1]))
    put(a[4], values)
    put(a[5], indices)
