"""Arguments of the caches that are of another type than their annotation says: told before anything is done."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch

from kvbackend.cache import (
    BlockPool,
    DsaLayer,
    GqaLayer,
    MlaLayer,
    PagedCache,
    SharedKvCache,
    SharedKvLayer,
    SparseAttention,
    Sparsity,
    deepseek_v4_layers,
    deepseek_v41_layers,
)
from kvbackend.cache.pool import OutOfBlocks
from kvbackend.errors import ArgumentError

BF16 = torch.bfloat16
V4 = deepseek_v4_layers([0, 4], 8)
VALUES = ["x", b"x", [1], (), {}, None, 1.5, nan, True, -1, 2**62, 10**30, object(), torch.zeros(2), torch.tensor(1)]


def paged(method: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        cache = PagedCache([GqaLayer(2, 8)], 4, 4, BF16, keep_recent=4)
        cache.append(cache.new_sequence(), 5)
        before = repr(cache), cache.used_bytes, cache.pool.num_free
        try:
            return getattr(cache, method)(**arguments)
        except ArgumentError:
            assert (repr(cache), cache.used_bytes, cache.pool.num_free) == before
            raise

    return call


def shared(method: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        cache = SharedKvCache(V4, 4, 16, 2, BF16, head_dim=32, window=8)
        cache.append(cache.new_sequence(), 5)
        return getattr(cache, method)(**arguments)

    return call


def pool(method: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        blocks = BlockPool(8, 1)
        blocks.allocate(3)
        before = str(vars(blocks))
        try:
            return getattr(blocks, method)(**arguments)
        except (ArgumentError, OutOfBlocks):
            assert str(vars(blocks)) == before
            raise

    return call


def sparse(method: str) -> Callable[..., Any]:
    """On a sequence of 31 tokens, the last of them not written yet."""

    def call(**arguments: Any) -> Any:
        cache = PagedCache([GqaLayer(2, 8)], 16, 4, BF16)
        for tensor in cache.layers[0].caches:
            tensor.zero_()
        reader, rows = SparseAttention(cache, SPARSITY), torch.zeros(30, 2, 8, dtype=BF16)
        seq = cache.new_sequence()
        reader.write(0, [seq], [30], cache.append(seq, 30), rows, rows)
        reader.attend(0, QUERY, [seq], [1], 0.1)
        cache.append(seq, 1)
        before = [tensor.clone() for tensor in cache.layers[0].caches]
        try:
            return getattr(reader, method)(**{n: cache if value is HERE else value for n, value in arguments.items()})
        except ArgumentError:
            assert all(map(torch.equal, cache.layers[0].caches, before))
            raise

    return call


SPARSITY = Sparsity(topk=4, sinks=1, recent=2, page_size=4)
QUERY, ROW, HERE = torch.zeros(1, 4, 8, dtype=BF16), torch.ones(1, 2, 8, dtype=BF16), object()
MEMORY = dict(layers=[GqaLayer(2, 8)], block_size=4, dtype=BF16, device="cpu", layout="NHD", kv_format="auto")
ROWS = dict(key=torch.zeros(1, 2, 8, dtype=BF16), value=torch.zeros(1, 2, 8, dtype=BF16))
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "GqaLayer": (GqaLayer, dict(kv_heads=2, head_dim=8, value_dim=8)),
    "MlaLayer": (MlaLayer, dict(kv_lora_rank=8, qk_rope_head_dim=8)),
    "DsaLayer": (
        lambda **arguments: PagedCache([DsaLayer(**arguments)], 4, 4, BF16),
        dict(kv_lora_rank=8, qk_rope_head_dim=8, index_dim=8, index_format="auto", latent_format="auto"),
    ),
    "SharedKvLayer": (
        lambda **arguments: SharedKvCache([SharedKvLayer(**arguments)], 4, 16, 2, BF16, head_dim=32, window=8),
        dict(compress_ratio=4, overlap=False, index_dim=8, compresses_index=False, source=None),
    ),
    "deepseek_v4_layers": (deepseek_v4_layers, dict(compress_ratios=[0, 4], index_dim=8)),
    "deepseek_v41_layers": (deepseek_v41_layers, dict(compress_ratios=[0, 4], kv_source_layer_ids=[1], index_dim=8)),
    "PagedCache": (
        PagedCache, dict(MEMORY, num_blocks=4, scales=[None], keep_recent=4, keep_sinks=4, keep_blocks=4),
    ),
    "with_memory": (PagedCache.with_memory, dict(MEMORY, memory_bytes=10000, scales=[None])),
    "SharedKvCache": (
        SharedKvCache,
        dict(
            layers=V4, num_blocks=4, block_size=16, num_sequences=2, dtype=BF16, device="cpu", head_dim=32, window=8,
            window_format="auto", kv_format="auto", index_format="auto", rewind=1,
        ),
    ),
    "write": (
        lambda **arguments: PagedCache([GqaLayer(2, 8)], 4, 4, BF16).layers[0].write(**arguments),
        dict(ROWS, slot_mapping=torch.zeros(1, dtype=torch.int64)),
    ),
    "attend": (
        paged("attend"), dict(layer=0, q=torch.zeros(1, 2, 8, dtype=BF16), seqs=[0], q_lens=[1], softmax_scale=0.1),
    ),
    "pages": (paged("pages"), dict(layer=0)),
    "read": (paged("read"), dict(layer=0, seq=0)),
    "BlockPool": (BlockPool, dict(num_blocks=8, reserved=1, what="pages")),
    "Sparsity": (
        Sparsity, dict(topk=4, sinks=1, recent=2, page_size=4, candidates=2, reselect=1, summaries=False),
    ),
    "Sparsity.of_layer": (Sparsity([4, 4]).of_layer, dict(layer=0, num_layers=2)),
    "SparseAttention": (
        SparseAttention,
        dict(cache=PagedCache([GqaLayer(2, 8)], 4, 4, BF16), sparsity=SPARSITY, dense_below=0, timed=False),
    ),
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "grow": dict(num_blocks=6),
    "append": dict(seq=0, num_tokens=1),
    "append_batch": dict(seqs=[0], num_tokens=[1]),
    "fork": dict(seq=0),
    "truncate": dict(seq=0, length=5),
    "free": dict(seq=0),
    "length": dict(seq=0),
    "batch": dict(seqs=[0], q_lens=[1]),
}
POOL = dict(
    ref_count=dict(block=1), allocate=dict(count=2), grow=dict(num_blocks=9), share=dict(blocks=[1]),
    free=dict(blocks=[1]),
)  # fmt: skip
SPARSE: dict[str, dict[str, Any]] = {
    "write": dict(layer=0, seqs=[0], counts=[1], slots=torch.tensor([30]), key=ROW, value=ROW),
    "attend": dict(layer=0, q=QUERY, seqs=[0], q_lens=[1], softmax_scale=0.1, softcap=1.0, sinks=torch.zeros(4)),
    "chosen": dict(layer=0, seq=0),
    "explain": dict(layer=0, heads=4, length=9),
    "choose_again": dict(seq=0),
    "forget": dict(seq=0),
    "moved_to": dict(cache=HERE, seqs={0: 0}),
}
CALLS |= {f"BlockPool.{name}": (pool(name), arguments) for name, arguments in POOL.items()}
CALLS |= {f"SparseAttention.{name}": (sparse(name), arguments) for name, arguments in SPARSE.items()}
CALLS |= {f"PagedCache.{name}": (paged(name), arguments) for name, arguments in METHODS.items()}
CALLS |= {f"SharedKvCache.{name}": (shared(name), arguments) for name, arguments in METHODS.items()}


def check_refusals(call: Callable[..., Any], good: dict[str, Any]) -> None:
    """A call that is good but for one argument, each in turn of other types and sizes, is taken or refused in words."""
    call(**good)
    told = []
    for argument in good:
        for value in VALUES:
            try:
                call(**{**good, argument: value})
            except ArgumentError as error:
                told.append(str(error))
            except OutOfBlocks:
                pass
    assert len(told) >= 5 * len(good)
    assert all(re.search(r"; .*: ", message) for message in told)


@pytest.mark.parametrize("name", CALLS)
def test_values_of_any_type_are_taken_or_refused_in_words(name: str) -> None:
    check_refusals(*CALLS[name])


def test_the_argument_and_what_it_may_be_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"^num_blocks is 'many'; it must be a whole number of 64 bits: pass one$"):
        PagedCache([GqaLayer(2, 8)], "many", 4, BF16)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^dtype is 'bfloat16'; it must be a torch\.dtype: pass one$"):
        PagedCache([GqaLayer(2, 8)], 4, 4, "bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^index_dim of DsaLayer is list; it must be a whole number"):
        DsaLayer(8, 8, index_dim=[8])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^layers is list; it must be a sequence, each a GqaLayer or a MlaLayer"):
        PagedCache([8], 4, 4, BF16)  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"^source of layer 0 is 3; a layer reads the rows of one before it"):
        SharedKvCache([SharedKvLayer(4, source=3)], 4, 16, 2, BF16)
