"""Which cases measure which op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ..native import missing
from ..ops import registry
from ..ops._samples import Maker
from . import attention, caches, codes, sparse
from .timing import Case

Cases = Callable[..., Iterator[Case]]  # (make, *, others): with the peers that must be installed, or without

WORKLOADS: dict[str, tuple[Cases, ...]] = {
    "paged_attention": (attention.gqa,),
    "mla_attention": (attention.mla,),
    "sparse_mla_attention": (sparse.attention,),
    "indexer_logits": (sparse.logits,),
    "lightning_indexer": (sparse.indexer,),
    "topk_indices": (sparse.topk,),
    "reshape_and_cache": (caches.write, codes.write),
    "concat_and_cache_mla": (caches.write_mla,),
    "copy_blocks": (caches.copy,),
    "gather_cache": (caches.gather, codes.gather),
    "compress_kv": (caches.pool,),
    "quantize_kv": (codes.quantize,),
    "dequantize_kv": (codes.dequantize,),
    "transcode": (codes.transcode,),
}


def cases(names: Iterable[str], *, others: bool = False) -> Iterator[Case]:
    """The cases of these ops, in the order of WORKLOADS; none for an op without a kernel here."""
    chosen = set(names)
    for name, makers in WORKLOADS.items():
        if name in chosen and not list(missing(registry[name], "cpu")):
            for maker in makers:
                yield from maker(Maker(torch.device("cpu"), torch.bfloat16), others=others)
