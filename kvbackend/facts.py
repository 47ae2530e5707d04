"""Which facts of a call a decision rests on, and a fast function that reads them.

`check` and `unsupported` get a `View` in place of each tensor. A view answers questions about metadata and notes each
answer it gave. From the notes `key_function` writes the source of a function that compares the sizes of a call with
the op's declared dims and returns the noted facts as a tuple: equal tuples mean equal decisions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .arrays import Array

if TYPE_CHECKING:
    from .spec import Op

# (argument, expression): the expression's `{}` stands for the argument; a size is '{}_<dim>'
Fact = tuple[str, str]
_SIZE = re.compile(r"\{\}_\d+")


class View:
    """A tensor's metadata; notes what is read."""

    __slots__ = ("_array", "_notes", "_tensor")

    def __init__(self, array: Array, tensor: torch.Tensor, notes: dict[Fact, None]) -> None:
        self._array, self._tensor, self._notes = array, tensor, notes

    def _note(self, expression: str) -> None:
        self._notes[self._array.name, expression] = None

    @property
    def dtype(self) -> torch.dtype:
        """Always part of the key, as is the device."""
        return self._tensor.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self._tensor.device

    @property
    def ndim(self) -> int:
        """Number of dims; of the declared ones, no fact."""
        if self._array.tail:
            self._note("{}.ndim")
        return self._tensor.dim()

    def dim(self) -> int:
        """As ndim."""
        return self.ndim

    @property
    def shape(self) -> Shape:
        """Sizes, noted one by one."""
        return Shape(self)

    def size(self, dim: int) -> int:
        """One size."""
        return self.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        self._note("{}.numel()")
        return self._tensor.numel()

    def stride(self, dim: int) -> int:
        """One stride, in elements."""
        self._note(f"{{}}.stride()[{dim}]")
        return self._tensor.stride()[dim]

    def element_size(self) -> int:
        """Bytes of an element."""
        return self._tensor.element_size()

    def is_contiguous(self) -> bool:
        """As torch has it."""
        self._note("{}.is_contiguous()")
        return self._tensor.is_contiguous()

    def is_aligned(self, num_bytes: int) -> bool:
        """Whether the data starts at a multiple of `num_bytes`."""
        self._note(f"{{}}.data_ptr() % {num_bytes} == 0")
        return self._tensor.data_ptr() % num_bytes == 0

    def is_pinned(self) -> bool:
        """Whether it is in pinned host memory."""
        self._note("{}.is_pinned()")
        return self._tensor.is_pinned()

    def shares_storage(self, other: View) -> bool:
        """Whether both are views of one allocation."""
        self._note(
            f"{other._array.name} is not None and {{}}.untyped_storage()._cdata == "
            f"{other._array.name}.untyped_storage()._cdata"
        )
        return self._tensor.untyped_storage()._cdata == other._tensor.untyped_storage()._cdata

    def overlaps(self, other: View) -> bool:
        """Whether the stretches of memory from first to last element meet; never on 'meta', where nothing is stored."""

        def end(name: str) -> str:
            last = f"sum((n - 1) * s for n, s in zip({name}.shape, {name}.stride()))"
            return f"{name}.data_ptr() + ({last} + 1) * {name}.element_size()"

        a, b = self._array.name, other._array.name
        expression = (
            f"{a}.device == {b}.device and {a}.device.type != 'meta' and {a}.numel() > 0 and {b}.numel() > 0 "
            f"and {a}.data_ptr() < {end(b)} and {b}.data_ptr() < {end(a)}"
        )
        self._note(expression)
        return bool(eval(expression, {a: self._tensor, b: other._tensor}))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a predicate asked {self._array.name} for {name!r}; predicates read metadata only: "
            f"dtype, device, shape, ndim, stride, is_contiguous, is_aligned, is_pinned, shares_storage"
        )


def fact(expression: str, **tensors: Any) -> Any:
    """The value of an expression of arguments' metadata, such as "x.shape[0] % 32".

    Decisions rest on this value alone, not on the sizes it is made of. The expression must have a value for any call.
    """
    first = next(iter(tensors.values()))
    if isinstance(first, View):
        first._note(expression)
        tensors = {name: view._tensor for name, view in tensors.items()}
    return eval(expression, {}, tensors)


class Shape:
    """The sizes of a View, noted one by one as they are read."""

    __slots__ = ("_view",)

    def __init__(self, view: View) -> None:
        self._view = view

    def __len__(self) -> int:
        return self._view.ndim

    def __getitem__(self, dim: Any) -> Any:
        if isinstance(dim, slice):
            return tuple(self[i] for i in range(len(self))[dim])
        array, shape = self._view._array, self._view._tensor.shape
        if array.tail:  # another call may have fewer dims
            enough = f"{{0}}.ndim > {dim}" if dim >= 0 else f"{{0}}.ndim >= {-dim}"
            self._view._note(f"{{0}}.shape[{dim}] if {enough} else None")
        else:
            self._view._note(f"{{}}_{range(len(shape))[dim]}")
        return shape[dim]

    def __iter__(self) -> Iterator[int]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, (tuple, list, torch.Size, Shape)) else other)

    def __repr__(self) -> str:
        return str(list(self._view._tensor.shape))


def views(op: Op, args: Mapping[str, Any], notes: dict[Fact, None]) -> dict[str, Any]:
    """The arguments with a View in place of each tensor."""
    seen = dict(args)
    for array in op.arrays:
        if args[array.name] is not None:
            seen[array.name] = View(array, args[array.name], notes)
    return seen


def scalars_named(op: Op, function: Callable[..., Any]) -> set[str]:
    """The arguments that are no tensors and that `function` names, and so may read."""
    tensors = {array.name for array in op.arrays}
    return {name for name in inspect.signature(function).parameters if name in op.parameters and name not in tensors}


def sizes_only(facts: Iterable[Fact]) -> bool:
    """Whether the facts are sizes alone, which the one who is called looks at himself."""
    return all(_SIZE.fullmatch(expression) for _, expression in facts)


def key_source(op: Op, facts: Iterable[Fact], more: Iterable[str], *, places: bool = True) -> list[str]:
    """Statements that set `_key` to the facts and to `more` expressions; ValueError where sizes do not fit.

    Without `places` sizes and devices are left to who is called: reading them takes most of the time.
    """
    by_array: dict[str, list[str]] = {}
    for name, expression in facts:
        if places or not _SIZE.fullmatch(expression):
            by_array.setdefault(name, []).append(f"({expression.format(name)})")
    lines: list[str] = []
    parts: list[str] = []
    sizes: dict[str, tuple[str, Array]] = {}  # word -> the variable that holds it, and whose dim that is
    compare: list[str] = []
    for array in sorted(op.arrays, key=lambda array: array.optional):
        unpack, relations = _size_source(array, sizes) if places else ("pass", [])
        where = f"{array.name}.is_cpu or {array.name}.device"  # the first is a third of the second's time
        facts_of = [f"{array.name}.dtype", *([where] if places else []), *by_array.get(array.name, [])]
        if array.optional:
            lines += [f"if {array.name} is None: {array.name}_key = None", "else:"]
            lines += [f"    {line}" for line in (unpack, *relations, f"{array.name}_key = ({', '.join(facts_of)},)")]
            parts += [f"{array.name}_key"]
        else:
            lines.append(unpack)
            compare += relations
            parts += facts_of
    # required arrays come first in `lines`, so their sizes are all known where they are compared
    first_optional = next((i for i, line in enumerate(lines) if line.startswith("if ")), len(lines))
    lines[first_optional:first_optional] = compare
    return [*lines, f"_key = ({', '.join([*parts, *more])},)"]


def _size_source(array: Array, sizes: dict[str, tuple[str, Array]]) -> tuple[str, list[str]]:
    """The statement that unpacks the sizes of one array, and those that compare them with `sizes` so far."""
    names = [f"{array.name}_{i}" for i in range(len(array.fixed))]
    words = list(zip(array.fixed, names, strict=True))
    targets = [f"{name}," for name in names]
    if array.tail:
        words.append(("*" + array.tail, f"{array.name}_tail"))
        targets.append(f"*{array.name}_tail,")
    compare = []
    for word, name in words:
        base, _, more = word.removeprefix("<=").removeprefix("1|").partition("+")
        if base.isdigit():
            want, guard = base, ""
        elif base in sizes:
            want, owner = sizes[base]
            guard = f"{owner.name} is not None and " if owner.optional else ""
        else:
            if base == word:
                sizes[base] = (name, array)
            continue
        if word.startswith("<="):
            wrong = f"{name} > {want}"
        elif word.startswith("1|"):
            wrong = f"{name} != 1 and {name} != {want}"
        else:
            wrong = f"{name} != {want} + {more}" if more else f"{name} != {want}"
        compare.append(f"if {guard}{wrong}: raise ValueError")
    return f"{' '.join(targets)} = {array.name}.shape", compare
