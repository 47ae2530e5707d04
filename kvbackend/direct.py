"""Resolved callables that go past torch's dispatcher, which takes longer than a small call itself.

The way: csrc/direct_call.h reads the arguments through DLPack's C interface to torch's tensors and calls the kernel
in its library (csrc/common/call.h). torch's profiler and dispatch modes do not see such a call, and its results,
which torch keeps as memory of another's, cannot be resized.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from . import native
from .spec import NATIVE_NAMESPACE

if TYPE_CHECKING:
    from .spec import Op

_KINDS = {"int": "i", "float": "f", "bool": "b", "str": "s", "Tensor": "t", "Optional[Tensor]": "t"}


def call(
    op: Op, example: Mapping[str, Any], fixed: Collection[str], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """`otherwise`, with a shorter way for calls of a CPU kernel like `example`.

    That way is for plain tensors in memory with the dtypes of the example, and its numbers where `fixed` names them.
    Whatever else is called, and what the kernel refuses, takes `otherwise`; so does all where torch or this build has
    no such way.
    """
    ops = native.library("cpu").direct_ops
    try:
        from . import _build
    except ImportError:
        return otherwise
    schema = getattr(getattr(torch.ops, NATIVE_NAMESPACE), op.name).default._schema
    kinds = {argument.name: _KINDS.get(str(argument.type)) for argument in schema.arguments}
    if not ops or None in kinds.values():
        return otherwise
    tensors = [value for name, value in example.items() if kinds[name] == "t" and value is not None]
    if any(tensor.dtype is torch.float8_e8m0fnu for tensor in tensors):  # the stable ABI has no name for it
        return otherwise
    parameters = []
    for name, parameter in op.signature.parameters.items():
        wanted = example[name] if kinds[name] == "t" or name in fixed else ...
        standard = ... if parameter.default is parameter.empty else parameter.default
        parameters.append((name, kinds[name], wanted, standard))
    return _build.direct_call(ops, op.name, parameters, otherwise) or otherwise
