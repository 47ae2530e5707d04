"""What the kernels behind resolved callables refuse themselves, so that nobody need look before them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import kvbackend
from kvbackend import backends
from kvbackend.matrix import copy_arguments
from kvbackend.ops import registry

ADAPTERS = {name: backends.registered()["cpu"].adapter(name) for name in registry}
REFUSING = [name for name, adapter in ADAPTERS.items() if getattr(adapter, "REFUSES", False)]


def misfits(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors of one more dim, and of one row less or more in each."""
    yield tensor[None]
    for dim, size in enumerate(tensor.shape):
        if size:
            yield tensor.narrow(dim, 0, size - 1)
            rows = tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor  # torch joins no FP8
            yield torch.cat([rows, rows.narrow(dim, 0, 1)], dim).view(tensor.dtype)


@pytest.mark.parametrize("name", REFUSING)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_written(name: str) -> None:
    op, run, refused = registry[name], ADAPTERS[name].run, 0
    for sample, args in op.make_samples("cpu", torch.float32):
        bound = op.bind((), args)
        for array in op.arrays:
            for misfit in misfits(bound[array.name]) if bound[array.name] is not None else ():
                call = copy_arguments({**bound, array.name: misfit})
                try:
                    op.validate(call)
                except kvbackend.ArgumentError:
                    before = copy_arguments(call)
                    with pytest.raises(RuntimeError):
                        run(*call.values())
                    refused += 1
                    for written in op.mutates:
                        if call[written] is not None:
                            assert same_bytes(call[written], before[written]), f"{sample}: {array.name} {misfit.shape}"
    assert refused


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", REFUSING)
def test_tensors_elsewhere_are_refused(name: str) -> None:
    op = registry[name]
    args = next(iter(op.make_samples("cpu", torch.float32)))[1]
    resolved = op.resolve(**args)
    tensors = {key: value.to("meta") for key, value in args.items() if isinstance(value, Tensor)}
    for elsewhere in (*({key: value} for key, value in tensors.items()), tensors):
        with pytest.raises((kvbackend.ArgumentError, kvbackend.UnsupportedError)):
            resolved(**{**args, **elsewhere})


@pytest.mark.parametrize("name", REFUSING)
def test_a_resolved_callable_tells_what_does_not_fit_as_the_op_does(name: str) -> None:
    op = registry[name]
    args = next(iter(op.make_samples("cpu", torch.float32)))[1]
    resolved = op.resolve(**args)
    for array in op.arrays:
        for misfit in misfits(args[array.name]) if args.get(array.name) is not None else ():
            wrong = {**args, array.name: misfit}
            try:
                op.validate(op.bind((), wrong))
            except kvbackend.ArgumentError as error:
                with pytest.raises(kvbackend.ArgumentError, match=f"^{re.escape(str(error))}$"):
                    resolved(**copy_arguments(wrong))
