"""A stand-in for torch_npu on CPU tensors: the published signatures of one build train over `tests/npu/vendor.py`.

It proves that calls fit the signatures of a release and what the documentation allows. It proves nothing about Ascend.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from kvbackend.backends.npu.target import snapshots
from tests.npu import vendor


class SignatureError(TypeError):
    """The call does not fit the op's schema."""


def _fits(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(kind.removeprefix("Optional[").removesuffix("]"), value)
    if kind.startswith("List["):
        inner = kind.removeprefix("List[").removesuffix("]")
        return isinstance(value, (list, tuple)) and all(_fits(inner, item) for item in value)
    types_of = {"Tensor": torch.Tensor, "int": int, "SymInt": int, "float": (int, float), "bool": bool, "str": str}
    return isinstance(value, types_of[kind]) and not (kind in ("int", "SymInt", "float") and isinstance(value, bool))


def bind(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, as the dispatcher would take them."""
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        raise SignatureError(f"{schema.name} takes {len(positional)} positional arguments, got {len(args)}")
    given = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    if given.keys() & kwargs.keys():
        raise SignatureError(f"{schema.name} got {sorted(given.keys() & kwargs.keys())} twice")
    given |= kwargs
    bound = {}
    for argument in schema.arguments:
        if argument.name in given:
            bound[argument.name] = given.pop(argument.name)
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
        else:
            raise SignatureError(f"{schema.name} lacks {argument.name}")
        if not _fits(str(argument.type), bound[argument.name]):
            raise SignatureError(f"{schema.name}: {argument.name} is no {argument.type}: {bound[argument.name]!r}")
    if given:
        raise SignatureError(f"{schema.name} has no argument {sorted(given)}")
    return bound


def schemas_of(train: str) -> dict[str, Any]:
    """The parsed schemas of a build train, by name without overload."""
    found = {}
    for variants in snapshots()["schemas"].values():
        for variant in variants:
            if train in variant["trains"]:
                schema = torch._C.parse_schema(variant["schema"])
                found[schema.name] = schema
    return found


class TorchNpu(types.ModuleType):
    """`sys.modules["torch_npu"]` for a test: `calls` and their `results`, and `mutate`, which may change a call."""

    def __init__(self, train: str) -> None:
        super().__init__("torch_npu")
        self.schemas = schemas_of(train)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.results: list[Any] = []
        self.mutate: Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] | None = None
        self.npu = types.SimpleNamespace(is_current_stream_capturing=lambda: False)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("npu_"):
            raise AttributeError(name)
        schema = self.schemas.get(name)
        if schema is None:
            raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.mutate is not None:
                args, kwargs = self.mutate(name, args, kwargs)
            bound = bind(schema, args, kwargs)
            self.calls.append((name, bound))
            result = vendor.OPERATORS[name](**bound)
            self.results.append(result)
            return result

        return call

    def of_cann(self, name: str) -> Callable[..., Any]:
        """In place of `kvbackend.backends.npu.cann_ops.op`: notes the call, by the package's name."""
        full_name, packet = f"cann_ops_transformer.{name}", getattr(torch.ops.cann_ops_transformer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.mutate is not None:
                args, kwargs = self.mutate(full_name, args, kwargs)
            self.calls.append((full_name, {}))
            try:
                result = packet(*args, **kwargs)
            except RuntimeError as error:
                if f"::{name}()" not in str(error):
                    raise
                raise SignatureError(str(error)) from error  # the dispatcher's
            self.results.append(result)
            return result

        return call
