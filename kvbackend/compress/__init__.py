"""Smaller KV caches: which tokens to keep, over the same paged cache."""

from .evicting_cache import EvictingCache
from .eviction import H2O, TOVA, L2Norm, Policy, PyramidKV, SlidingWindow, SnapKV, StreamingLLM

__all__ = [
    "H2O",
    "TOVA",
    "EvictingCache",
    "L2Norm",
    "Policy",
    "PyramidKV",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
]
