"""What an op is: one decorated function whose signature, docstring and body are the specification.

    @op(group="paged cache", mutates=("key_cache",))
    def my_op(key: Float[Tensor, "T D"], key_cache: Float[Tensor, "nb bs D"], slots: Index[Tensor, "T"]) -> None:
        \"\"\"What it does, in one sentence. ...\"\"\"
        (the reference, in plain torch: it runs where no backend can, and it judges every backend)

    @my_op.check      what must hold besides shapes and dtypes; reads metadata only, calls `need`
    @my_op.values     what must hold of the values; asked only under KVBACKEND_CHECK=values
    @my_op.fake       outputs without data, for torch.compile and graph capture
    @my_op.samples    calls that contract tests, `kvbackend matrix` and benchmarks make; (name, arguments) pairs

`check` and the backends' `unsupported` see views that record what is read: dispatch keeps a decision for as long as
exactly those facts stay the same. So name in their signatures only what they read, and take the rest as `**_`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .arrays import Array, Arrays, Kind
from .errors import ArgumentError
from .typed import kind_of, need

# One namespace for what callers see, one for the kernels that device libraries bring. Both have the same schemas:
# a library only implements them, so it can be loaded before or after this module.
NAMESPACE, NATIVE_NAMESPACE = "kvbackend", "kvbackend_native"
_library = torch.library.Library(NAMESPACE, "DEF")
_native_library = torch.library.Library(NATIVE_NAMESPACE, "DEF")

_SCHEMA_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str"}

Sample = tuple[str, dict[str, Any]]


class Op:
    """A registered op. Calling it calls `torch.ops.kvbackend.<name>`, which dispatches to a backend."""

    def __init__(
        self,
        reference: Callable[..., Any],
        group: str,
        mutates: tuple[str, ...],
        any_device: tuple[str, ...],
        exact: bool,
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.group = group
        self.mutates = mutates
        self.exact = exact
        self.signature = inspect.signature(reference)
        self.parameters = tuple(self.signature.parameters)
        hints = typing.get_type_hints(reference, include_extras=True)
        self.arrays = Arrays(_arrays_of(hints, self.parameters), frozenset(any_device))
        self.schema = f"{self.name}{_schema_of(self, hints)}"
        self.__doc__ = reference.__doc__
        self.__name__ = self.name
        self.__wrapped__ = reference
        self._check: Callable[..., None] = lambda **_: None
        self._values: Callable[..., None] = lambda **_: None
        self._fake: Callable[..., Any] | None = None
        self._samples: Callable[..., Iterable[Sample]] = lambda device, dtype: ()

        from .dispatch import Dispatcher  # dispatch knows ops by their fields only

        self.dispatcher = Dispatcher(self)
        _library.define(self.schema, tags=(torch.Tag.needs_fixed_stride_order,))
        _native_library.define(self.schema)
        _library.impl(self.name, self.dispatcher.entry, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._run_fake, lib=_library)
        numbers = (at for at, name in enumerate(self.parameters) if hints[name] in (int, float))
        self._numbers = tuple((at, self.parameters[at]) for at in numbers)
        self._kinds = {name: kind_of(hints[name]) for name in self.parameters if hints[name] in _SCHEMA_TYPES}
        self._overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default

    @property
    def summary(self) -> str:
        """The docstring's first sentence."""
        return inspect.cleandoc(self.__doc__ or "").split("\n\n")[0].replace("\n", " ")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for at, name in self._numbers:
            value = args[at] if at < len(args) else kwargs.get(name)
            if value is True or value is False:  # which torch would take for 1 or 0
                raise ArgumentError(f"{name} is {value}; it is a number: pass one")
        try:
            return self._overload(*args, **kwargs)
        except (RuntimeError, TypeError, AttributeError):  # of a wrong type torch tells in words of its own
            wrong = self._wrong(args, kwargs)
            if wrong is None:
                raise
        raise wrong

    def __repr__(self) -> str:
        return f"<kvbackend op {self.schema}>"

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name, defaults filled in; raises ArgumentError for names and types that are not the op's."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{self.name}: {error}; it takes {', '.join(self.parameters)}: pass these") from None
        bound.apply_defaults()
        for name, kind in self._kinds.items():
            need(name, bound.arguments[name], kind)
        return dict(bound.arguments)

    def _wrong(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ArgumentError | None:
        """What is wrong with a call that could not be made, if it is the call."""
        try:
            self.arrays.check(self.bind(args, kwargs))
        except ArgumentError as error:
            return error
        return None

    def resolve(self, **example: Any) -> Callable[..., Any]:
        """Choose once, for calls like this one, and return a callable without per-call choosing.

        It takes the op's own arguments with other batch, token and block counts. Raises ArgumentError where shapes do
        not fit each other, and UnsupportedError where something that the choice rested on has changed. A CPU kernel may
        be called past torch's dispatcher, where torch's profiler and dispatch modes see nothing; results cannot
        be resized then (`kvbackend.direct`).
        """
        return self.dispatcher.resolve(self.bind((), example))

    def validate(self, args: Mapping[str, Any]) -> None:
        """Raise ArgumentError if the call is wrong, from metadata alone."""
        self.arrays.check(args)
        self._check(**args)

    # what an op file adds to its function

    def check(self, function: Callable[..., None]) -> Callable[..., None]:
        """Set what must hold besides shapes and dtypes."""
        self._check = function
        self.dispatcher.add_reader(function)
        return function

    def values(self, function: Callable[..., None]) -> Callable[..., None]:
        """Set what must hold of values."""
        self._values = function
        return function

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set how outputs look."""
        self._fake = function
        return function

    def samples(self, function: Callable[..., Iterable[Sample]]) -> Callable[..., Iterable[Sample]]:
        """Set the example calls."""
        self._samples = function
        return function

    def make_samples(self, device: str | torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        """The op's own example calls: (name, arguments)."""
        yield from self._samples(torch.device(device), dtype)

    def check_values(self, args: Mapping[str, Any]) -> None:
        """Raise ArgumentError where the values are wrong. Reads them, so it waits for the device."""
        self._values(**args)

    def _run_fake(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.bind(args, kwargs)
        self.validate(bound)
        return self._fake(**bound) if self._fake else None


def op(
    *, group: str, mutates: tuple[str, ...] = (), any_device: tuple[str, ...] = (), exact: bool = False
) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated reference function an op.

    group        the heading it is listed under
    mutates      the arguments it writes; it writes nothing else and returns nothing it wrote
    any_device   tensor arguments that need not be on the device of the others
    exact        its results are copies or integers, so every backend must match the reference to the bit
    """
    return lambda reference: Op(reference, group, mutates, any_device, exact)


def _unwrap_optional(hint: Any) -> tuple[Any, bool]:
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if type(None) in typing.get_args(hint) and len(parts) == 1:
        return parts[0], True
    return hint, False


def _arrays_of(hints: Mapping[str, Any], parameters: tuple[str, ...]) -> Iterator[Array]:
    for name in parameters:
        hint, optional = _unwrap_optional(hints[name])
        metadata = getattr(hint, "__metadata__", ())
        if metadata:
            kind, dims = metadata
            assert isinstance(kind, Kind)
            yield Array(name, kind.dtypes, dims, optional)


def _schema_of(op: Op, hints: Mapping[str, Any]) -> str:
    arrays = {array.name: array for array in op.arrays}
    written = {name: chr(ord("a") + i) for i, name in enumerate(op.mutates)}
    arguments = []
    for name, parameter in op.signature.parameters.items():
        if name in arrays:
            alias = f"({written[name]}!)" if name in written else ""
            text = f"Tensor{alias}{'?' if arrays[name].optional else ''} {name}"
        else:
            text = f"{_SCHEMA_TYPES[hints[name]]} {name}"
        if parameter.default is not inspect.Parameter.empty:
            text += f"={parameter.default!r}" if not isinstance(parameter.default, str) else f'="{parameter.default}"'
        arguments.append(text)
    result = hints["return"]
    if result is type(None):
        returns = "()"
    else:
        count = len(typing.get_args(result)) if typing.get_origin(result) is tuple else 1
        returns = f"({', '.join(['Tensor'] * count)})"
    return f"({', '.join(arguments)}) -> {returns}"


__all__ = ["NAMESPACE", "NATIVE_NAMESPACE", "Op", "Sample", "Tensor", "op"]
