"""What the ops' samples are made of: small pools and batches, odd sizes, NaN wherever no row should be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..codecs import split
from ..layouts import allocate_kv
from . import _pages

NO_BLOCK = 1 << 20  # fills table entries beyond a sequence: whoever reads one fails


@dataclass
class Maker:
    """Makes tensors of one device and dtype, the same in every run, with their values drawn on the host."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(20261129))

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        if self.device.type == "meta":  # sizes alone are asked for
            return torch.empty(*shape, dtype=self.dtype, device=self.device)
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.dtype).to(self.device)

    def ints(self, values: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)

    def codes(self, kv_format: str, shape: tuple[int, ...], role: str = "key", layout: str = "NHD") -> dict[str, Any]:
        """A cache [nb, bs, (Hk,) dim] of codes that stand for something, with the scales that belong to it.

        Keys: cache, scale (static, or nvfp4's global one, or None), scale_cache (those of tokens, or None).
        """
        fmt = formats.get(kv_format)
        heads = shape if len(shape) == 4 else (*shape[:2], 1, shape[2])  # a latent cache has no dim of heads

        def number(*sizes: int) -> Tensor:
            return torch.rand(*sizes, generator=self.generator) + 0.25

        size = split.codes_shape(fmt, heads)
        if layout == "HND":
            size = (size[0], size[2], size[1], size[3])
        codes = torch.randint(0, 256, size, generator=self.generator, dtype=torch.uint8).view(split.storage(fmt))
        codes = codes.transpose(1, 2) if layout == "HND" else codes
        scale = scale_cache = None
        if fmt.global_scale:
            scale = number(1) / 64
        elif fmt.granularity in split.STATIC:
            scale = number(*split.scales_shape(fmt, role, heads)) / 64
        if fmt.granularity not in split.STATIC:
            scale_cache = number(*split.scales_shape(fmt, role, heads)).to(split.scale_dtype(fmt))
        if len(shape) == 3:
            codes, scale_cache = codes[:, :, 0], None if scale_cache is None else scale_cache[:, :, 0]
        found = dict(cache=codes, scale=scale, scale_cache=scale_cache)
        return {name: None if tensor is None else tensor.to(self.device) for name, tensor in found.items()}


@dataclass
class Pages(Maker):
    """Blocks, and the sequences in them."""

    num_blocks: int = 7
    block_size: int = 4

    def slots(self, num_tokens: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Distinct slots in no order."""
        return self.permutation(self.num_blocks * self.block_size)[:num_tokens].to(dtype).to(self.device)

    def block_tables(self, seq_lens: list[int]) -> list[list[int]]:
        """The blocks of each sequence, in no order, none shared."""
        free = self.permutation(self.num_blocks).tolist()
        return [[free.pop() for _ in range(-(-length // self.block_size))] for length in seq_lens]

    def fill(self, cache: Tensor, tables: list[list[int]], seq_lens: list[int]) -> None:
        """Random rows for the tokens that exist; whatever else is in the cache stays."""
        for table, length in zip(tables, seq_lens, strict=True):
            for i, block in enumerate(table):
                count = min(self.block_size, length - i * self.block_size)
                cache[block, :count] = self.randn(count, *cache.shape[2:])

    def batch(self, q_lens: list[int], seq_lens: list[int]) -> tuple[dict[str, Any], list[list[int]]]:
        """The arguments that describe a varlen batch, and its tables as lists."""
        tables = self.block_tables(seq_lens)
        width = max([len(table) for table in tables], default=0) + 1
        cumulated = [0]
        for length in q_lens:
            cumulated.append(cumulated[-1] + length)
        padded = [table + [NO_BLOCK] * (width - len(table)) for table in tables]
        return dict(
            block_table=self.ints(padded).reshape(len(tables), width),
            seq_lens=self.ints(seq_lens),
            cu_seqlens_q=self.ints(cumulated),
            max_seqlen_q=max([b - a for a, b in pairwise(cumulated)], default=0),
        ), tables


@dataclass
class Pool(Pages):
    """Sizes of a paged K/V cache."""

    num_blocks: int = 14
    block_size: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    layout: str = "NHD"

    @classmethod
    def variants(cls, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Pool]]:
        """The pools that every op over a K/V cache must take."""
        yield "block 1", cls(device, dtype, num_blocks=97, block_size=1)
        yield "block 16", cls(device, dtype, block_size=16)
        yield "block 61", cls(device, dtype, num_blocks=3, block_size=61)
        yield "HND cache", cls(device, dtype, layout="HND")
        yield "interleaved cache", cls(device, dtype, layout="interleaved")
        yield "Dv other than D", cls(device, dtype, head_dim=24, value_dim=10)
        yield "one kv head, odd dims", cls(device, dtype, kv_heads=1, head_dim=7, value_dim=7)
        yield "production", cls(device, dtype, num_blocks=12, block_size=16, kv_heads=8, head_dim=128, value_dim=128)

    def caches(self) -> tuple[Tensor, Tensor]:
        """Key and value caches, all NaN."""
        caches = allocate_kv(
            self.num_blocks, self.block_size, self.kv_heads, self.head_dim, self.value_dim,
            dtype=self.dtype, device=self.device, layout=self.layout,
        )  # fmt: skip
        return caches[0].fill_(torch.nan), caches[1].fill_(torch.nan)

    def rows(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some tokens."""
        shape = num_tokens, self.kv_heads
        return self.randn(*shape, self.head_dim), self.randn(*shape, self.value_dim)


@dataclass
class MlaPool(Pages):
    """Sizes of a paged MLA cache."""

    kv_lora_rank: int = 24
    qk_rope_head_dim: int = 6
    fused: bool = False

    @classmethod
    def variants(cls, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, MlaPool]]:
        """The pools that every op over an MLA cache must take."""
        yield "block 1", cls(device, dtype, num_blocks=97, block_size=1)
        yield "block 16", cls(device, dtype, block_size=16)
        yield "block 61", cls(device, dtype, num_blocks=3, block_size=61)
        yield "fused cache", cls(device, dtype, fused=True)
        yield "odd rank", cls(device, dtype, kv_lora_rank=13, qk_rope_head_dim=2)
        large = cls(device, dtype, num_blocks=3, block_size=64, kv_lora_rank=512, qk_rope_head_dim=64, fused=True)
        yield "production", large

    def caches(self) -> tuple[Tensor, Tensor]:
        """Latent and rotary caches, all NaN; fused, they are slices of one tensor."""
        rank, shape = self.kv_lora_rank, (self.num_blocks, self.block_size)
        pages = torch.full((*shape, rank + self.qk_rope_head_dim), torch.nan, dtype=self.dtype, device=self.device)
        parts = pages[..., :rank], pages[..., rank:]
        return parts if self.fused else (parts[0].contiguous(), parts[1].contiguous())

    def rows(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys of some tokens."""
        return self.randn(num_tokens, self.kv_lora_rank), self.randn(num_tokens, self.qk_rope_head_dim)


@dataclass
class IndexPool(Pages):
    """Sizes of a paged cache of index keys, and of the queries that score them."""

    num_blocks: int = 24
    heads: int = 3
    dim: int = 16
    kv_format: str = "auto"

    @classmethod
    def variants(cls, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, IndexPool]]:
        """The pools that every op over index keys must take."""
        yield "block 1", cls(device, dtype, num_blocks=97, block_size=1)
        yield "block 16", cls(device, dtype, block_size=16)
        yield "block 61", cls(device, dtype, num_blocks=3, block_size=61)
        yield "one head, odd dim", cls(device, dtype, heads=1, dim=7)
        yield "many heads", cls(device, dtype, heads=40, dim=40)
        for name in INDEX_RECORDS:
            yield name, cls(device, dtype, num_blocks=4, block_size=16, heads=32, dim=128, kv_format=name)
        yield "production", cls(device, dtype, num_blocks=8, block_size=64, heads=64, dim=128)

    def call(self, q_lens: list[int], seq_lens: list[int], compress_ratio: int = 1, **other: Any) -> dict[str, Any]:
        """Queries, weights, and keys that are NaN wherever none was written."""
        entries = [length // compress_ratio for length in seq_lens]
        batch, tables = self.batch(q_lens, entries)
        if self.kv_format == "auto":
            shape: tuple[int, ...] = (self.num_blocks, self.block_size, self.dim)
            key_cache = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
        else:
            shape = (self.num_blocks, formats.record(self.kv_format).page_bytes(self.block_size))
            key_cache = torch.full(shape, 255, dtype=torch.uint8, device=self.device)
        for table, length in zip(tables, entries, strict=True):
            slots = [table[i // self.block_size] * self.block_size + i % self.block_size for i in range(length)]
            _pages.write(key_cache, self.kv_format, self.ints(slots), self.randn(length, self.dim), self.block_size)
        num_tokens = sum(q_lens)
        call = dict(q=self.randn(num_tokens, self.heads, self.dim), weights=self.randn(num_tokens, self.heads))
        batch["seq_lens"] = self.ints(seq_lens)
        known = {} if self.kv_format == "auto" else dict(kv_format=self.kv_format, block_size=self.block_size)
        return {**call, "key_cache": key_cache, **batch, "compress_ratio": compress_ratio, **known, **other}


INDEX_RECORDS = [name for name in formats.record_names() if formats.record(name).holds == "index_key"]

# (name, lengths of the queries, lengths of the sequences)
BATCHES: list[tuple[str, list[int], list[int]]] = [
    ("decode", [1, 1, 1], [5, 1, 9]),
    ("prefill", [6, 3], [6, 3]),
    ("chunked prefill", [4, 2], [9, 7]),
    ("mixed", [1, 5, 0, 2], [8, 5, 3, 2]),
    ("empty sequence", [0, 1, 0], [0, 4, 0]),
    ("query of no cached token", [1, 1], [0, 3]),
    ("no tokens", [0, 0], [3, 0]),
    ("empty batch", [], []),
]
