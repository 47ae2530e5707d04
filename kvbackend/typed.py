"""Arguments of public classes are what their annotations say; where one is not, an ArgumentError tells before anything
is done."""

from __future__ import annotations

import functools
import inspect
import numbers
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from .errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


class Kind(NamedTuple):
    """What an annotation allows: in words, and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    if type(value) is int:  # nearly always: methods that are called for each layer and step check lists of these
        return -(2**63) <= value < 2**63
    if isinstance(value, bool):
        return False
    try:
        return isinstance(value, torch.SymInt) or -(2**63) <= operator.index(value) < 2**63
    except (TypeError, RuntimeError):  # torch's way of saying that a tensor is no whole number
        return False


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):  # torch takes one element for its value
        return value.numel() == 1
    return isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _is_iterable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _is_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_PLAIN: dict[Any, Kind] = {
    int: Kind("a whole number of 64 bits", _is_whole),
    float: Kind("a number", _is_number),
    bool: Kind("True or False", lambda value: isinstance(value, (bool, torch.SymBool))),
    str: Kind("a text", _is_of(str)),
    type(None): Kind("None", lambda value: value is None),
    torch.dtype: Kind("a torch.dtype", _is_of(torch.dtype)),
    torch.device: Kind("a torch.device", _is_of(torch.device)),
    torch.Tensor: Kind("a tensor", _is_of(torch.Tensor)),
}


@functools.cache
def kind_of(hint: Any) -> Kind:
    """What an annotation allows."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind_of(part) for part in inner]
        return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.fits(value) for kind in kinds))
    if origin is Sequence:
        one = kind_of(inner[0])
        return Kind(
            f"a sequence, each {one.words}",
            lambda value: isinstance(value, Collection) and _is_iterable(value) and all(map(one.fits, value)),
        )
    if origin is Iterable:  # what comes out of it is checked by who goes through it, which may be possible once
        return Kind(f"an iterable, each {kind_of(inner[0]).words}", _is_iterable)
    if origin is Mapping:
        one = kind_of(inner[1])
        return Kind(
            f"a mapping, each value {one.words}",
            lambda value: isinstance(value, Mapping) and all(map(one.fits, value.values())),
        )
    if origin is Callable:
        return Kind("a function", callable)
    if isinstance(hint, type):
        return Kind(f"a {hint.__name__}", _is_of(hint))
    return Kind("anything", lambda value: True)


def need(name: str, value: Any, kind: Kind) -> None:
    """Raise ArgumentError unless the value is of that kind."""
    if not kind.fits(value):
        got = repr(value) if isinstance(value, (str, bytes, numbers.Number, type(None))) else type(value).__name__
        raise ArgumentError(f"{name} is {got}; it must be {kind.words}: pass one")


def need_sizes(owner: object, least: int = 1, most: int = 2**20, **sizes: int) -> None:
    """Raise ArgumentError unless these fields of a record, or arguments of another object, are within these bounds.

    The products of sizes up to the default one fit 64 bits, as far as there is memory for them.
    """
    of = f" of {type(owner).__name__}" if is_dataclass(owner) else ""
    for name, size in sizes.items():
        if not least <= size <= most:
            raise ArgumentError(f"{name}{of} is {size}; it must be from {least} to {most}: pass what the model needs")


def _kinds(function: Callable[..., Any]) -> Iterator[tuple[str, Kind]]:
    hints = typing.get_type_hints(function)
    for name in inspect.signature(function).parameters:
        if name in hints:
            yield name, kind_of(hints[name])


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of each call by the annotations, which are resolved at the first."""
    names: tuple[str, ...] = tuple(inspect.signature(function).parameters)
    kinds: dict[str, Kind] = {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kinds:
            kinds.update(_kinds(function))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kind = kinds.get(name)
            if kind is not None and not kind.fits(value):
                need(name, value, kind)
        return function(*args, **kwargs)

    return call


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass, at its __post_init__."""
    for name, hint in typing.get_type_hints(type(record)).items():
        need(f"{name} of {type(record).__name__}", getattr(record, name), kind_of(hint))
