"""What compressing a KV cache costs a real model on real text: `kvbackend eval`."""

from .evaluate import Evaluator, default_schemes, granularity_sweep, pareto
from .sample import QUICK, Passage, Query, Settings, passages

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
