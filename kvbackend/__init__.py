"""KV-cache operations with one contract on Ascend NPUs, NVIDIA GPUs and the CPU.

Importing this package loads neither torch nor a device library; names are resolved on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import cache, compress, doctor, formats, layouts, models, ops, rope
    from .dispatch import explain, use
    from .errors import ArgumentError, UnsupportedError
    from .planner import plan

# public name -> (module, attribute); no attribute: the module itself
_LAZY: dict[str, tuple[str, str | None]] = {
    "ops": ("ops", None),
    "cache": ("cache", None),
    "compress": ("compress", None),
    "doctor": ("doctor", None),
    "formats": ("formats", None),
    "layouts": ("layouts", None),
    "models": ("models", None),
    "rope": ("rope", None),
    "explain": ("dispatch", "explain"),
    "use": ("dispatch", "use"),
    "plan": ("planner", "plan"),
    "ArgumentError": ("errors", "ArgumentError"),
    "UnsupportedError": ("errors", "UnsupportedError"),
}

__all__ = [
    "ArgumentError",
    "UnsupportedError",
    "__version__",
    "cache",
    "compress",
    "doctor",
    "explain",
    "formats",
    "layouts",
    "models",
    "ops",
    "plan",
    "rope",
    "use",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvbackend' has no attribute {name!r}")
    from importlib import import_module

    module_name, attribute = _LAZY[name]
    module = import_module(f"{__name__}.{module_name}")
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
