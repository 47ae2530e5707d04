"""What compressing a KV cache costs a real model on real text: `kvbackend eval`.

Names are imported when they are used: comparing saved documents and drawing them take neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .evaluate import Evaluator, default_schemes, granularity_sweep, pareto
    from .sample import QUICK, Passage, Query, Settings, passages

_HOMES = {
    "evaluate": ("Evaluator", "default_schemes", "granularity_sweep", "pareto"),
    "sample": ("QUICK", "Passage", "Query", "Settings", "passages"),
}

__all__ = [
    "QUICK",
    "Evaluator",
    "Passage",
    "Query",
    "Settings",
    "default_schemes",
    "granularity_sweep",
    "pareto",
    "passages",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
