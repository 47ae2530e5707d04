"""Paged caches: a pool of blocks, and sequences that append, fork, truncate and free over it."""

from .dsa import DsaLayer, DsaPages
from .layers import GqaLayer, GqaPages, MlaLayer, MlaPages
from .paged import PagedCache
from .pool import BlockPool, OutOfBlocks
from .shared_kv import SharedKvLayer, SharedKvPages, deepseek_v4_layers, deepseek_v41_layers
from .shared_kv_cache import SharedKvBatch, SharedKvCache
from .sparse import SparseAttention, Sparsity

__all__ = [
    "BlockPool",
    "DsaLayer",
    "DsaPages",
    "GqaLayer",
    "GqaPages",
    "MlaLayer",
    "MlaPages",
    "OutOfBlocks",
    "PagedCache",
    "SharedKvBatch",
    "SharedKvCache",
    "SharedKvLayer",
    "SharedKvPages",
    "SparseAttention",
    "Sparsity",
    "deepseek_v4_layers",
    "deepseek_v41_layers",
]
