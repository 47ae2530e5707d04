"""Smaller KV caches: which tokens to keep, over the same paged cache; which dims of a head to keep."""

from ..eviction import H2O, TOVA, L2Norm, Policy, PyramidKV, SlidingWindow, SnapKV, StreamingLLM
from . import lowrank
from .calibrate import Calibration, PostRopeWarning, calibrate
from .evicting_cache import EvictingCache
from .lowrank import Projection

__all__ = [
    "H2O",
    "TOVA",
    "Calibration",
    "EvictingCache",
    "L2Norm",
    "Policy",
    "PostRopeWarning",
    "Projection",
    "PyramidKV",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
    "calibrate",
    "lowrank",
]
