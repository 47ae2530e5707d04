"""What doubles of libraries for NVIDIA GPUs share: a module whose calls are recorded, and may be changed by a test."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any


class RejectedError(RuntimeError):
    """The library checks this and raises, or leaves it undefined."""


def need(condition: object, why: str) -> None:
    if not condition:
        raise RejectedError(why)


class Library(types.ModuleType):
    """For `sys.modules`: functions by their names in the module, `calls` so far, and `mutate`, which may edit one."""

    def __init__(self, name: str, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(name)
        self.calls: list[str] = []
        self.mutate: Callable[[str, dict[str, Any]], None] | None = None
        for dotted, function in functions.items():
            *path, last = dotted.split(".")
            place: Any = self
            for step in path:
                if not hasattr(place, step):
                    setattr(place, step, types.SimpleNamespace())
                place = getattr(place, step)
            setattr(
                place,
                last,
                self.copy(dotted, function) if inspect.isclass(function) else self.recorded(dotted, function),
            )

    def copy(self, name: str, original: type) -> type:
        """A class of this library's own, whose methods are recorded."""
        methods = {
            method: self.recorded(f"{name}.{method}", function)
            for method, function in vars(original).items()
            if inspect.isfunction(function)
        }
        return type(original.__name__, (original,), methods)

    def recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            if not name.endswith("__init__"):  # a wrapper is made once
                self.calls.append(name)
            if self.mutate is not None:
                self.mutate(name, arguments)
            return function(**arguments)

        return call
