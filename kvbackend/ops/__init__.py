"""The ops: one file each, found by name. `kvbackend.ops.<op>(...)` is `torch.ops.kvbackend.<op>(...)`.

All are bound eagerly: importing `ops.x` alone would leave the module, not the op, under the op's name.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..spec import Op

registry: dict[str, Op] = {
    module.name: getattr(import_module(f"{__name__}.{module.name}"), module.name)
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
}
globals().update(registry)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Op: ...


def get(name: str) -> Op:
    """The op of that name; ArgumentError lists the ops there are."""
    if name not in registry:
        raise ArgumentError(f"there is no op {name!r}; the ops are {', '.join(registry)}: check the name")
    return registry[name]
