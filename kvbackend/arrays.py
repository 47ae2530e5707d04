"""Shapes and dtypes in signatures: `q: Float[Tensor, "T H D"]` is read by people, by mypy and by the dispatcher.

The dims of an array are words. A name stands for one size in the whole call, wherever it appears. Besides a name:
`B+1` is one more than B, `1|Hk` is 1 or Hk, `<=T` is at most T, a number is itself, and `*page` (last) is any tail
of dims, the same wherever it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import torch

from .errors import ArgumentError


@dataclass(frozen=True)
class Array:
    """What one tensor argument may be: its dtypes, and its dims as words."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    dims: tuple[str, ...]
    optional: bool = False

    @cached_property
    def tail(self) -> str | None:
        """The word of the open tail, without its star."""
        return self.dims[-1][1:] if self.dims and self.dims[-1].startswith("*") else None

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """The dims before the open tail."""
        return self.dims[:-1] if self.tail else self.dims

    @cached_property
    def may_require_grad(self) -> bool:
        """Whether its dtypes are ones that torch differentiates."""
        return not self.dtypes or any(dtype.is_floating_point for dtype in self.dtypes)

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(self.dims)}]"


class Kind:
    """A family of dtypes; subscripting it makes an annotation."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        self.dtypes = dtypes

    def __getitem__(self, item: tuple[Any, str]) -> Any:
        tensor, dims = item
        return Annotated[tensor, self, tuple(dims.split())]


if TYPE_CHECKING:  # to a type checker these are torch.Tensor with a remark
    from typing import Annotated as Float
    from typing import Annotated as Float32
    from typing import Annotated as FloatOrE4m3
    from typing import Annotated as Index
    from typing import Annotated as Int32
    from typing import Annotated as Rows
else:
    Float = Kind(torch.float32, torch.bfloat16, torch.float16, torch.float64)
    Float32 = Kind(torch.float32)
    FloatOrE4m3 = Kind(*Float.dtypes, torch.float8_e4m3fn)
    Int32 = Kind(torch.int32)
    Index = Kind(torch.int32, torch.int64)
    Rows = Kind()


def need(condition: Any, message: str) -> None:
    """Raise ArgumentError(message) unless the condition holds; a symbolic one is asserted by torch when it is known."""
    if isinstance(condition, torch.SymBool):
        torch._check(condition, lambda: message)
    elif not condition:
        raise ArgumentError(message)


def one_of(items: Iterable[object]) -> str:
    """'a, b or c'."""
    *most, last = [str(item) for item in items] or ["nothing"]
    return f"{', '.join(most)} or {last}" if most else last


class Arrays:
    """The tensor arguments of one op: checks a call, word by word, and says what is wrong with it."""

    def __init__(self, arrays: Iterable[Array], any_device: frozenset[str] = frozenset()) -> None:
        self.arrays = tuple(arrays)
        self.any_device = any_device  # arguments that may sit on a device of their own

    def __iter__(self) -> Any:
        return iter(self.arrays)

    def check(self, args: Mapping[str, Any]) -> None:
        """Ranks, dtypes, devices, then sizes; the first thing wrong raises ArgumentError."""
        present = [array for array in self.arrays if args[array.name] is not None]
        for array in self.arrays:
            tensor = args[array.name]
            need(
                isinstance(tensor, torch.Tensor) or (tensor is None and array.optional),
                f"{array.name} is {type(tensor).__name__}; it must be a tensor [{', '.join(array.dims)}]: pass one",
            )
            need(
                tensor is None or tensor.layout is torch.strided,
                f"{array.name} has layout {getattr(tensor, 'layout', None)}; it must be torch.strided: make it dense",
            )
        first: Array | None = None
        for array in present:
            tensor = args[array.name]
            rank, fixed = tensor.dim(), len(array.fixed)
            need(
                rank == fixed or (array.tail is not None and rank > fixed),
                f"{array.name} has {rank} dims, shape {list(tensor.shape)}; it must be [{', '.join(array.dims)}]: "
                f"reshape it or pass another tensor",
            )
            need(
                not array.dtypes or tensor.dtype in array.dtypes,
                f"{array.name} is {tensor.dtype}; it must be {one_of(array.dtypes)}: convert it where it is made",
            )
            if array.name in self.any_device:
                continue
            if first is None:
                first = array
            device = args[first.name].device
            need(
                tensor.device == device,
                f"{array.name} is on {tensor.device} but {first.name} is on {device}; all tensors of a call must be "
                f"on one device: move {array.name} with .to({str(device)!r})",
            )
        sizes: dict[str, tuple[Any, str]] = {}
        deferred = []
        for array in present:
            shape = args[array.name].shape
            words = list(zip(array.fixed, shape, strict=False))
            if array.tail:
                rest = shape[len(array.fixed) :]
                words.append((f"number of {array.tail} dims", len(rest)))
                words.extend((f"{array.tail}[{i}]", size) for i, size in enumerate(rest))
            for word, size in words:
                if word not in sizes and not _is_relation(word):
                    sizes[word] = (size, array.name)
                else:
                    deferred.append((array, word, size))
        for array, word, size in deferred:
            _compare(array, word, size, sizes)


def _is_relation(word: str) -> bool:
    return word[0] in "<1234567890" or "+" in word


def _compare(array: Array, word: str, size: Any, sizes: Mapping[str, tuple[Any, str]]) -> None:
    base, _, more = word.removeprefix("<=").removeprefix("1|").partition("+")
    if base.isdigit():
        want, owner = int(base), ""
    elif base in sizes:
        want, owner = sizes[base][0], f", the {base} of {sizes[base][1]}"
    else:  # the optional argument that would say it is absent
        return
    if word.startswith("<="):
        good, allowed = size <= want, f"at most {want}{owner}"
    elif word.startswith("1|"):
        good = True if isinstance(size, int) and size == 1 else size == want
        allowed = f"1 or {want}{owner}"
    else:
        want = want + int(more or 0)
        good, allowed = size == want, f"{want}{owner}" + (f" plus {more}" if more else "")
    need(
        good,
        f"{array.name} [{', '.join(array.dims)}] has {word.removeprefix('<=')} = {size}; it must be {allowed}: "
        f"pass tensors of one call, or reshape {array.name}",
    )
