"""Backends: one folder each, here or in an installed package with an entry point in group `kvbackend.backends`.

A backend's package says which torch device type it serves (`DEVICE`), in which order it is asked (`ORDER`, lower
first), and what this machine lacks for it (`missing()` yields reasons). Each op that it has a kernel for is one
module of the op's name:

    def unsupported(<the arguments it reads>, **_):  yields every reason why it cannot take this call
    def run(<the op's arguments>):                   does it

    REFUSES = True                                   if `run` itself refuses, before it writes, every call whose sizes
                                                     do not fit or whose tensors are on another device: a resolved
                                                     callable leaves that to it then

For these a package may have a shorter way: `shorter(op, example, fixed, otherwise)` returns what a resolved callable
for calls like `example` is to be, with `otherwise` for what does not fit (`direct.call` has the details).

The module's existence is the registration. A package may say in `WITHOUT` (op -> words) why it has no module for an op,
and in `EVIDENCE` how it is known that its adapters are right as long as no device has run them; `EVIDENCE_OF` (op ->
words) where that differs. `kvbackend matrix merge` shows these words until a device's results are there.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..spec import Op

REFERENCE = "reference"  # every op's own body: serves every device, asked last
ENTRY_POINT_GROUP = "kvbackend.backends"
TRANSLATED = "translated, not run"  # the evidence of a backend that declares none


class Adapter(Protocol):
    """What a backend's op module holds."""

    unsupported: Callable[..., Iterable[str]]
    run: Callable[..., object]


@dataclass(frozen=True)
class Backend:
    """A folder of kernels for one device type."""

    name: str
    package: str
    device: str | None  # torch device type; None: it failed to import, so it is shown for every device
    order: int
    _missing: Callable[[], Iterable[str]]
    _without: Mapping[str, str] = field(default_factory=dict, compare=False)
    evidence: str = TRANSLATED
    _evidence_of: Mapping[str, str] = field(default_factory=dict, compare=False)
    _shorter: Callable[..., Callable[..., Any]] | None = field(default=None, compare=False)

    def missing(self) -> tuple[str, ...]:
        """Why this machine cannot use the backend at all; asked once per process."""
        return _missing_once(self)

    def absence(self, op_name: str) -> str:
        """The words for an op that it has no kernel for."""
        why = self._without.get(op_name)
        return f"has no kernel for {op_name}" + (f": {why}" if why else "")

    def evidence_of(self, op_name: str) -> str:
        """How it is known, without a run on the device, that its adapter of an op is right."""
        return self._evidence_of.get(op_name, self.evidence)

    def shorter(
        self, op: Op, example: Mapping[str, Any], fixed: Collection[str], otherwise: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`otherwise`, or a quicker callable for calls like `example` of an op whose adapter refuses what is wrong."""
        return self._shorter(op, example, fixed, otherwise) if self._shorter else otherwise

    def adapter(self, op_name: str) -> Adapter | None:
        """The backend's module for an op, or None where it has no kernel for it."""
        return _adapter(self.package, op_name)


@cache
def _missing_once(backend: Backend) -> tuple[str, ...]:
    return tuple(backend._missing())


@cache
def _adapter(package: str, op_name: str) -> ModuleType | None:
    name = f"{package}.{op_name}"
    try:
        found = find_spec(name)
    except ModuleNotFoundError:  # the package itself cannot be imported: `_load` made that a reason
        return None
    return import_module(name) if found else None


@cache
def registered() -> dict[str, Backend]:
    """All backends by name, in the order in which they are asked."""
    packages = {module.name: f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__) if module.ispkg}
    packages.update({point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)})
    found = sorted((_load(name, package) for name, package in packages.items()), key=lambda b: (b.order, b.name))
    return {backend.name: backend for backend in found}


def serving(device_type: str) -> list[Backend]:
    """The backends of a torch device type, in the order in which they are asked."""
    return [backend for backend in registered().values() if backend.device in (device_type, None)]


def names() -> list[str]:
    """What may be chosen explicitly."""
    return [*registered(), REFERENCE]


def _load(name: str, package: str) -> Backend:
    try:
        module = import_module(package)
        return Backend(
            name,
            package,
            module.DEVICE,
            module.ORDER,
            module.missing,
            getattr(module, "WITHOUT", {}),
            getattr(module, "EVIDENCE", TRANSLATED),
            getattr(module, "EVIDENCE_OF", {}),
            getattr(module, "shorter", None),
        )
    except Exception as error:  # a plugin's fault must not take the others away
        reason = f"backend package {package} cannot be used ({error})"

        def broken() -> Iterator[str]:
            yield f"{reason}: correct, reinstall or remove the package that provides it"

        return Backend(name, package, None, 1 << 30, broken)
