"""What adapters to libraries for NVIDIA GPUs share: which GPU is here, whether a package fits, limits as data.

A function's limits are facts with a source: the checks in the library's own code at one commit. Predicates name the
property and the value that they found; the sentence is made here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from .. import formats
from ..arrays import one_of
from .limits import Rule

# Predicates answer for this compute capability where no GPU is found, so that any machine can ask; `missing` says that
# there is none.
ASSUMED = (9, 0)


@cache
def capability() -> tuple[int, int]:
    """The compute capability that predicates answer for."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else ASSUMED


@dataclass(frozen=True)
class Package:
    """A library as we call it.

    module   what is imported
    install  how to get it
    calls    what we call, by its name within the module, and the parameters that we name
    source   repository, commit and path in which these were read
    """

    module: str
    install: str
    calls: Mapping[str, tuple[str, ...]]
    source: str

    def missing(self) -> Iterator[str]:
        """Why the library cannot be used on this machine. Imports it only where there is a GPU."""
        if find_spec(self.module) is None:
            yield f"{self.module} is not installed; its kernels are called where it is: {self.install}"
            return
        if not torch.cuda.is_available():
            yield f"torch finds no CUDA device; {self.module} runs on one: install a CUDA build of torch and the driver"
            return
        try:
            module = import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:
            yield f"{self.module} cannot be imported ({error}); it must fit torch and CUDA: {self.install} again"
            return
        for name, parameters in self.calls.items():
            lacking = _lacking(module, name, parameters)
            if lacking:
                yield (
                    f"{self.module} has no {lacking}; it is called as of {self.source}: install a version that has it"
                )


def _lacking(module: Any, name: str, parameters: tuple[str, ...]) -> str:
    """What a module lacks of a function and of its parameters; empty if nothing that can be seen."""
    try:
        function = reduce(getattr, name.split("."), module)
    except AttributeError:
        return name
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled functions show none
        return ""
    return ", ".join(f"parameter {parameter} of {name}" for parameter in parameters if parameter not in known)


@dataclass(frozen=True)
class Limit:
    """What one property of a call may be, on GPUs of some compute capabilities (their major numbers; empty: all)."""

    name: str
    rule: Rule
    majors: tuple[int, ...] = ()
    source: str = ""  # where it differs from the function's


@dataclass(frozen=True)
class Function:
    """One function of a library.

    majors  the compute capabilities that it runs on, by their major numbers
    source  where that and the limits stand
    note    what is not documented, or what a device run must show
    """

    name: str
    majors: tuple[int, ...]
    source: str
    limits: tuple[Limit, ...]
    note: str = ""

    def is_here(self) -> bool:
        """Whether the current GPU runs the function, and so has limits of its own."""
        return capability()[0] in self.majors

    def missing(self) -> Iterator[str]:
        """Why the current GPU does not run the function."""
        if not self.is_here():
            have = ".".join(map(str, capability()))
            yield (
                f"the GPU has compute capability {have}; {self.name} runs on {one_of(f'{m}.x' for m in self.majors)} "
                f"({self.source}): use backend 'cuda_triton' there"
            )

    def refuse(self, name: str, value: Any, got: str, todo: str) -> Iterator[str]:
        """The reason against a property's value, if there is one; `got` says in words what the value is of."""
        limit = self.limit(name)
        if limit is not None and not limit.rule.allows(value):
            yield f"{got} {value}; {self.name} takes {limit.rule} ({limit.source or self.source}): {todo}"

    def plain(self, kv_format: str) -> Iterator[str]:
        """The reason against a cache of codes: the function reads numbers."""
        if any(side != "auto" and formats.get(side).quantized for side in formats.pair(kv_format)):
            yield f"kv_format is {kv_format!r}; {self.name} is called for auto, bf16 and fp16: choose one of these"

    def without(self, **arguments: Any) -> Iterator[str]:
        """The reasons against arguments that the function has no counterpart of."""
        for name, value in arguments.items():
            if value is not None:
                yield f"{name} is given; {self.name} has nothing of the kind ({self.source}): leave it out"

    def limit(self, name: str) -> Limit | None:
        """The limit of a property on the current GPU; None where the GPU does not run the function."""
        if not self.is_here():
            return None
        here = capability()[0]
        return next(limit for limit in self.limits if limit.name == name and here in (limit.majors or self.majors))
