"""What writes, copies and gathers rows of bfloat16 caches, and what pools tokens into compressed rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops._samples import Maker
from . import peers
from .pages import filled
from .timing import Case

SLOTS = 1 << 19
KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
RANK, ROPE = 512, 64
TOKENS = (1, 16, 256, 2048, 8192)
MOVED_BLOCKS = 128
POOLED, POOLED_DIM = 32768, 512
TURNS = 8


def _pool(*row: int) -> Tensor:
    return filled(SLOTS // BLOCK_SIZE, BLOCK_SIZE, *row, dtype=torch.bfloat16)


def _slots(make: Maker, tokens: int) -> list[Tensor]:
    """A prompt fills whole blocks in any order; a decode step writes one token in each of some blocks."""
    if tokens <= BLOCK_SIZE:
        return [make.permutation(SLOTS)[:tokens] for _ in range(TURNS)]
    offsets = torch.arange(BLOCK_SIZE)
    return [
        (make.permutation(SLOTS // BLOCK_SIZE)[: tokens // BLOCK_SIZE, None] * BLOCK_SIZE + offsets).flatten()
        for _ in range(TURNS)
    ]


def write(make: Maker, *, others: bool) -> Iterator[Case]:
    """reshape_and_cache, keys and values."""
    key_cache, value_cache = _pool(KV_HEADS, HEAD_DIM), _pool(KV_HEADS, HEAD_DIM)
    rows = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    pages = peers.VllmPages(key_cache, value_cache) if others else None
    for tokens in TOKENS:
        key, value = make.randn(tokens, KV_HEADS, HEAD_DIM), make.randn(tokens, KV_HEADS, HEAD_DIM)
        other = dict(key=key, value=value, key_cache=key_cache, value_cache=value_cache)

        def index_copy(call: dict[str, Any]) -> None:
            for cached, new in zip(rows, (call["key"], call["value"]), strict=True):
                cached.index_copy_(0, call["slot_mapping"], new)

        named: dict[str, peers.Peer] = {"torch index_copy_": index_copy}
        if pages is not None:
            named[f"vllm {pages.isa}"] = lambda call: pages.write(call["key"], call["value"], call["slot_mapping"])
        yield Case(
            "reshape_and_cache", f"{tokens} tokens",
            [dict(other, slot_mapping=slots) for slots in _slots(make, tokens)],
            moved_bytes=4 * key.nbytes, limit="copy_gbs", peers=named,
        )  # fmt: skip


def write_mla(make: Maker, *, others: bool) -> Iterator[Case]:
    """concat_and_cache_mla, latents and rotary keys of one cache."""
    cache = _pool(RANK + ROPE)
    rows = cache.flatten(0, 1)
    for tokens in TOKENS:
        ckv, kpe = make.randn(tokens, RANK), make.randn(tokens, ROPE)
        other = dict(ckv=ckv, kpe=kpe, ckv_cache=cache[..., :RANK], kpe_cache=cache[..., RANK:])

        def index_copy(call: dict[str, Any]) -> None:
            rows.index_copy_(0, call["slot_mapping"], torch.cat([call["ckv"], call["kpe"]], -1))

        named: dict[str, peers.Peer] = {"torch cat, index_copy_": index_copy}
        if others and peers.has("concat_and_cache_mla_cpu"):
            named["vllm concat_and_cache_mla"] = lambda call: peers.vllm().concat_and_cache_mla_cpu(
                call["ckv"], call["kpe"], cache, call["slot_mapping"]
            )
        yield Case(
            "concat_and_cache_mla", f"{tokens} tokens",
            [dict(other, slot_mapping=slots) for slots in _slots(make, tokens)],
            moved_bytes=2 * (ckv.nbytes + kpe.nbytes), limit="copy_gbs", peers=named,
        )  # fmt: skip


def copy(make: Maker, *, others: bool) -> Iterator[Case]:
    """copy_blocks inside a pool."""
    cache = _pool(KV_HEADS, HEAD_DIM)
    mappings = [make.permutation(len(cache))[: 2 * MOVED_BLOCKS].view(-1, 2) for _ in range(TURNS)]
    pairs = {mapping.data_ptr(): mapping.tolist() for mapping in mappings}

    def indexed(call: dict[str, Any]) -> None:
        source, target = call["block_mapping"].unbind(1)
        cache[target] = cache[source]

    def loop(call: dict[str, Any]) -> None:
        for source, target in pairs[call["block_mapping"].data_ptr()]:
            cache[target].copy_(cache[source])

    yield Case(
        "copy_blocks", f"{MOVED_BLOCKS} blocks", [dict(cache=cache, block_mapping=mapping) for mapping in mappings],
        moved_bytes=2 * MOVED_BLOCKS * cache[0].nbytes, limit="copy_gbs",
        peers={"torch pool[to] = pool[from]": indexed, "python loop of copy_": loop},
    )  # fmt: skip


def gather(make: Maker, *, others: bool) -> Iterator[Case]:
    """gather_cache of one sequence; torch makes its result too, or has a buffer that caches hold."""
    cache = _pool(KV_HEADS, HEAD_DIM)
    tokens = MOVED_BLOCKS * BLOCK_SIZE
    buffer = cache.new_empty(MOVED_BLOCKS, *cache.shape[1:])
    other = dict(cache=cache, cu_seqlens=make.ints([0, tokens]), num_tokens=tokens)
    calls = [dict(other, block_table=make.permutation(len(cache))[None, :MOVED_BLOCKS].int()) for _ in range(TURNS)]

    def select(call: dict[str, Any], out: Tensor | None = None) -> Tensor:
        return torch.index_select(cache, 0, call["block_table"][0], out=out).flatten(0, 1)

    yield Case(
        "gather_cache", f"{MOVED_BLOCKS} blocks", calls, moved_bytes=2 * buffer.nbytes, limit="copy_gbs",
        peers={"torch index_select": select, "torch index_select(out=)": partial(select, out=buffer)},
    )  # fmt: skip


def pool(make: Maker, *, others: bool) -> Iterator[Case]:
    """compress_kv of a prompt: DeepSeek-V4's two ways, of 4 tokens overlapping and of 128."""
    for ratio, overlap in ((4, True), (128, False)):
        width = POOLED_DIM * (2 if overlap else 1)
        bias, weight = make.randn(ratio, width).float(), torch.ones(POOLED_DIM)
        other = dict(
            norm_weight=weight, seq_lens=make.ints([POOLED]), cu_seqlens_q=make.ints([0, POOLED]), eps=1e-6,
            compress_ratio=ratio, overlap=overlap, position_bias=bias,
        )  # fmt: skip
        calls = [dict(other, kv=make.randn(POOLED, width), gate=make.randn(POOLED, width)) for _ in range(2)]
        named: dict[str, peers.Peer] = {"torch.compile": peers.compiled_pooling(ratio, overlap)} if others else {}
        yield Case(
            "compress_kv", f"{POOLED} tokens, {ratio} to 1", calls, limit="copy_gbs", peers=named,
            moved_bytes=2 * (2 * POOLED * width + POOLED // ratio * POOLED_DIM),
        )  # fmt: skip
