"""What the kernels behind resolved callables refuse themselves, so that nobody need look before them; and that tensors
of other sizes, by whichever way they come, are refused or read as the reference reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbackend
from kvbackend import backends, native
from kvbackend.matrix import copy_arguments
from kvbackend.matrix.judge import TOLERANCES, difference, flat_results, in_float64
from kvbackend.ops import registry
from kvbackend.spec import Op

ADAPTERS = {name: backends.registered()["cpu"].adapter(name) for name in registry}
BY_TORCH = {"absorb_q", "lowrank_project", "lowrank_reconstruct", "project_out", "quantize_kv"}  # some calls of theirs
REFUSING = [name for name, adapter in ADAPTERS.items() if getattr(adapter, "REFUSES", False)]


@pytest.fixture(autouse=True)
def built() -> None:
    """The kernels are there, also for who calls them past the dispatcher, which loads them."""
    assert native.library("cpu").reason is None


def misfits(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors of one dim more or less, and of one row less or more in each; what is more names no token nor block."""
    yield tensor[None]
    if tensor.dim() and tensor.shape[0]:
        yield tensor[0]
    for dim, size in enumerate(tensor.shape):
        if size:
            yield tensor.narrow(dim, 0, size - 1)
            rows = tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor  # torch joins no FP8
            more = rows.narrow(dim, 0, 1)
            names = tensor.dtype in (torch.int32, torch.int64)
            yield torch.cat([rows, torch.full_like(more, -1) if names else more], dim).view(tensor.dtype)


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
                    with pytest.raises(RuntimeError, match=r"\[kvbackend\] "):
                        run(*call.values())
                    refused += 1
                    for written in op.mutates:
                        if call[written] is not None:
                            assert same_bytes(call[written], before[written]), f"{sample}: {array.name} {misfit.shape}"
    assert refused


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))


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


def without_nans(value: Any) -> Any:
    """Rows that nobody wrote may be named where sizes are others; as NaN they reach what they must not."""
    if not isinstance(value, Tensor) or value.dtype not in TOLERANCES:
        return value
    return value.where(~value.isnan(), torch.zeros((), dtype=value.dtype))


def outcome(op: Op, run: Any, call: dict[str, Any]) -> dict[str, Tensor] | Exception:
    """What a call gives back and writes, or why it does not."""
    call = copy_arguments(call)
    try:
        return flat_results(op, run(*call.values()), call)
    except (RuntimeError, ValueError, IndexError) as error:
        return error


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_other_sizes_are_refused_or_give_what_the_reference_gives(name: str) -> None:
    """By the resolved callable, and by the kernel alone: never a crash, nor silently something else."""
    op, refused, given = registry[name], 0, 0
    for sample, args in op.make_samples("cpu", torch.float32):
        bound = {key: without_nans(value) for key, value in op.bind((), args).items()}
        try:
            with kvbackend.use("cpu"):
                ways = {"resolved": op.resolve(**bound)}
        except kvbackend.UnsupportedError:
            continue
        if name not in BY_TORCH:
            ways["kernel"] = ADAPTERS[name].run
        for array in op.arrays:
            for misfit in misfits(bound[array.name]) if bound[array.name] is not None else ():
                call = {**bound, array.name: misfit}
                got = {
                    f"{sample}: {array.name} {list(misfit.shape)}, {way}": outcome(op, run, call)
                    for way, run in ways.items()
                }
                for what, result in got.items():
                    clear = isinstance(result, (kvbackend.ArgumentError, kvbackend.UnsupportedError))
                    assert clear or isinstance(result, dict) or "[kvbackend] " in str(result), f"{what}: {result!r}"
                try:
                    op.validate(call)
                except kvbackend.ArgumentError:
                    assert not any(isinstance(result, dict) for result in got.values()), f"one is taken: {list(got)}"
                    refused += 1
                    continue
                try:
                    op.check_values(call)
                except kvbackend.ArgumentError:  # such as blocks that the smaller cache lacks: there is no right result
                    continue
                want = flat_results(op, op.reference(**(wanted := in_float64(op, call))), wanted)
                if not list(ADAPTERS[name].unsupported(**call)):
                    refusals = {what: result for what, result in got.items() if isinstance(result, Exception)}
                    others = [r for r in refusals.values() if not isinstance(r, kvbackend.UnsupportedError)]
                    assert not others, f"refused, though the op takes it: {refusals}"
                for what, result in got.items():
                    for key, tensor in result.items() if isinstance(result, dict) else ():
                        allowed = 0.0 if op.exact else TOLERANCES.get(tensor.dtype, 0.0)
                        assert difference(tensor, want[key].to(tensor.dtype)) <= allowed, f"{what}: {key}"
                        given += 1
    assert refused
    assert given
