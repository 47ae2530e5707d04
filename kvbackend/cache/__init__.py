"""Paged caches: a pool of blocks, and sequences that append, fork, truncate and free over it."""

from .layers import GqaLayer, GqaPages, MlaLayer, MlaPages
from .paged import PagedCache
from .pool import BlockPool, OutOfBlocks
from .sparse import SparseAttention, Sparsity

__all__ = [
    "BlockPool",
    "GqaLayer",
    "GqaPages",
    "MlaLayer",
    "MlaPages",
    "OutOfBlocks",
    "PagedCache",
    "SparseAttention",
    "Sparsity",
]
