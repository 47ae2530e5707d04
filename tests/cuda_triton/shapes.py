"""Calls of production size on device 'meta': what is compiled, and what a GPU is timed on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvbackend import formats
from kvbackend.codecs import split

from . import quantized

Call = tuple[str, str, dict[str, Any]]  # op, case, arguments


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _side(kv_format: str, shape: tuple[int, ...], role: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """A cache in a format, and its scales under the names `scale` and `scale_cache`."""
    fmt = formats.get(kv_format)
    cache = _meta(*split.codes_shape(fmt, shape), dtype=split.storage(fmt))
    scales = {}
    if fmt.global_scale:
        scales["scale"] = _meta(1, dtype=torch.float32)
    if fmt.quantized:
        static = fmt.granularity in split.STATIC
        scales["scale" if static else "scale_cache"] = _meta(
            *split.scales_shape(fmt, role, shape), dtype=split.scale_dtype(fmt)
        )
    return cache, scales


def _records_of(holds: str, left_out: str) -> list[str]:
    return [name for name in formats.record_names() if formats.record(name).holds == holds and name != left_out]


@dataclass(frozen=True)
class Shapes:
    """Sizes of the calls. Each sequence fills its blocks, and the blocks of all fill the pool."""

    num_seqs: int = 8
    length: int = 4096
    prefill: int = 512  # queries of a sequence
    index_length: int = 32768
    topk: int = 2048
    tokens: int = 256  # that are written or rotated
    mla_heads: int = 128

    def batch(self, queries: int, length: int, block_size: int) -> dict[str, Any]:
        return dict(
            block_table=_meta(self.num_seqs, length // block_size, dtype=torch.int32),
            seq_lens=_meta(self.num_seqs, dtype=torch.int32),
            cu_seqlens_q=_meta(self.num_seqs + 1, dtype=torch.int32),
            max_seqlen_q=queries,
        )

    def paged(
        self, queries: int, kv_format: str = "bf16", group: int = 4, dim: int = 128, block_size: int = 16, **other: Any
    ) -> dict[str, Any]:
        """8 kv heads."""
        shape = self.num_seqs * self.length // block_size, block_size, 8, dim
        key_format, value_format = formats.pair(kv_format)
        key_cache, k = _side(key_format, shape, "key")
        value_cache, v = _side(value_format, shape, "value")
        scales = {f"k_{name}": scale for name, scale in k.items()} | {f"v_{name}": scale for name, scale in v.items()}
        return dict(
            q=_meta(self.num_seqs * queries, 8 * group, dim), key_cache=key_cache, value_cache=value_cache,
            **self.batch(queries, self.length, block_size), **scales, softmax_scale=dim**-0.5, kv_format=kv_format,
            **other,
        )  # fmt: skip

    def placed(self, queries: int, dim: int) -> dict[str, Any]:
        """Keys with positions and biases of their own."""
        call = self.paged(queries, dim=dim)
        rows = call["key_cache"].shape[:2]
        own = dict(key_positions=_meta(*rows, dtype=torch.int32), key_bias=_meta(*rows, 8, dtype=torch.float32))
        return call | own

    def mla(self, queries: int, heads: int | None = None, kv_format: str = "auto") -> dict[str, Any]:
        """DeepSeek-V3: latent and rotary part in one pool."""
        shape = self.num_seqs * self.length // 64, 64
        pages = _meta(*shape, 576)
        caches: dict[str, Any] = dict(ckv_cache=pages[..., :512], kpe_cache=pages[..., 512:])
        if kv_format != "auto":
            codes, scales = _side(kv_format, (*shape, 1, 512), "key")
            caches["ckv_cache"] = codes[:, :, 0]
            caches |= {f"k_{name}": part if name == "scale" else part[:, :, 0] for name, part in scales.items()}
            caches["kv_format"] = kv_format
        num_tokens, heads = self.num_seqs * queries, heads or self.mla_heads
        parts = dict(q_nope=_meta(num_tokens, heads, 512), q_pe=_meta(num_tokens, heads, 64))
        return dict(**parts, **caches, **self.batch(queries, self.length, 64), softmax_scale=0.1)

    def sparse_mla(self, queries: int, kv_format: str = "auto") -> dict[str, Any]:
        """DeepSeek-V3.2: chosen tokens of each query."""
        call = self.mla(queries)
        if kv_format != "auto":
            call |= dict(ckv_cache=self.records(kv_format), kpe_cache=None, kv_format=kv_format)
        return call | dict(topk_indices=_meta(self.num_seqs * queries, self.topk, dtype=torch.int32))

    def shared_kv(self, queries: int, window_format: str, kv_format: str, chosen: bool = True) -> dict[str, Any]:
        """DeepSeek-V4 and V4.1: a ring of 128 rows and one entry for 4 tokens."""

        def pages(name: str, blocks: int) -> torch.Tensor:
            return _meta(blocks, 64, 512) if name == "auto" else self.records(name, blocks)

        tokens = self.num_seqs * queries
        blocks_of_entries = max(self.length // 256, 1)
        batch = self.batch(queries, blocks_of_entries, 1)
        chosen_ones = dict(topk_indices=_meta(tokens, self.topk // 4, dtype=torch.int32)) if chosen else {}
        return dict(
            q=_meta(tokens, self.mla_heads // 2, 512), window_cache=pages(window_format, 2 * self.num_seqs),
            window_table=_meta(self.num_seqs, 2, dtype=torch.int32), window=128, kv=_meta(tokens, 512),
            compressed_cache=pages(kv_format, self.num_seqs * blocks_of_entries), compress_ratio=4, softmax_scale=0.1,
            **batch, **chosen_ones, sinks=_meta(self.mla_heads // 2), window_format=window_format, kv_format=kv_format,
            cos_sin=_meta(8192, 64, dtype=torch.float32),
        )  # fmt: skip

    def compressing(self, queries: int, ratio: int, overlap: bool = False) -> dict[str, Any]:
        """DeepSeek-V4's rows: CSA is ratio 4 with overlap, HCA ratio 128."""
        tokens, width = self.num_seqs * queries, 1024 if overlap else 512
        batch = self.batch(queries, self.length // ratio, 64)
        del batch["max_seqlen_q"]
        return dict(
            kv=_meta(tokens, width), gate=_meta(tokens, width), norm_weight=_meta(512), compress_ratio=ratio, eps=1e-6,
            overlap=overlap, position_bias=_meta(ratio, width, dtype=torch.float32), **batch, block_size=64,
            state=_meta(self.num_seqs, 2 * ratio, 2 * width, dtype=torch.float32),
            state_slots=_meta(self.num_seqs, dtype=torch.int32), cos_sin=_meta(8192, 64, dtype=torch.float32),
        )  # fmt: skip

    def scoring(self, queries: int, **other: Any) -> dict[str, Any]:
        """What queries pay to 8 kv heads' keys."""
        call = self.paged(queries)
        scores = _meta(self.num_seqs, 8, self.length, dtype=torch.float32)
        return {name: value for name, value in call.items() if "value" not in name} | dict(scores=scores) | other

    def middle(self, queries: int) -> dict[str, Any]:
        """The batch of 8 kv heads whose tokens are chosen, 16 to a page, between the first ones and the last."""
        batch = self.batch(queries, self.length, 16)
        return dict(q=_meta(self.num_seqs * queries, 32, 128), **batch, page_size=16, num_sinks=16, num_recent=64)

    def bounding(self) -> dict[str, Any]:
        """The bounds of all pages, in blocks of 16 pages."""
        columns = max(self.length // 256, 1)
        bounds = {name: _meta(self.num_seqs * columns, 16, 8, 128) for name in ("low_cache", "high_cache")}
        return self.middle(1) | bounds | dict(block_table=_meta(self.num_seqs, columns, dtype=torch.int32))

    def looking(self, kv_format: str = "bf16") -> dict[str, Any]:
        """At the tokens of a fourth of the pages."""
        call = self.paged(1, kv_format, block_size=32)
        keys = {name: value for name, value in call.items() if name != "softmax_scale" and not name.startswith("v")}
        pages = _meta(self.num_seqs, 8, max(self.length // 64, 1), dtype=torch.int32)
        return self.middle(1) | keys | dict(pages=pages)

    def sparse(self, queries: int, kv_format: str = "bf16") -> dict[str, Any]:
        """Attention to chosen tokens."""
        chosen = _meta(self.num_seqs * queries, 8, self.topk // 4, dtype=torch.int32)
        return self.middle(queries) | self.paged(queries, kv_format, block_size=32) | dict(topk_indices=chosen)

    def keeping(self) -> dict[str, Any]:
        """The better half of the tokens of each kv head, as scores choose them."""
        scores = _meta(self.num_seqs, 8, self.length, dtype=torch.float32)
        lengths = _meta(self.num_seqs, dtype=torch.int32)
        ends = dict(num_sinks=4, num_recent=16)
        return dict(scores=scores, seq_lens=lengths, budget=self.length // 2, pooling="avg", kernel=5, **ends)

    def compacting(self) -> dict[str, Any]:
        """The same half to the front."""
        pages, table = self.num_seqs * self.length // 16, self.batch(1, self.length, 16)["block_table"]
        kept = _meta(self.num_seqs, 8, self.length // 2, dtype=torch.int32)
        return dict(cache=_meta(pages, 16, 8, 128), block_table=table, kept=kept)

    def projecting(self) -> dict[str, Any]:
        """DeepSeek-V3's hidden states into its cache."""
        caches = {name: cache for name, cache in self.mla(1).items() if name in ("ckv_cache", "kpe_cache")}
        return dict(
            hidden=_meta(self.tokens, 7168), w_kva=_meta(576, 7168), norm_weight=_meta(512), eps=1e-6, **caches,
            cos_sin=_meta(8192, 64, dtype=torch.float32), positions=_meta(self.tokens, dtype=torch.int64),
            slot_mapping=_meta(self.tokens, dtype=torch.int64),
        )  # fmt: skip

    def index(self, queries: int, kv_format: str = "auto") -> dict[str, Any]:
        """DeepSeek-V3.2's indexer."""
        blocks = self.num_seqs * self.index_length // 64
        pages = _meta(blocks, 64, 128)
        if kv_format != "auto":
            pages = _meta(blocks, formats.record(kv_format).page_bytes(64), dtype=torch.uint8)
        return dict(
            q=_meta(self.num_seqs * queries, 64, 128), weights=_meta(self.num_seqs * queries, 64, dtype=torch.float32),
            key_cache=pages, **self.batch(queries, self.index_length, 64), kv_format=kv_format,
        )  # fmt: skip

    def writing(self, kv_format: str = "bf16") -> dict[str, Any]:
        """New tokens of 8 kv heads."""
        call = self.paged(1, kv_format)
        caches = {name: call[name] for name in call if "cache" in name or name in ("k_scale", "v_scale", "kv_format")}
        rows = dict(key=_meta(self.tokens, 8, 128), value=_meta(self.tokens, 8, 128))
        return dict(**rows, **caches, slot_mapping=_meta(self.tokens, dtype=torch.int64))

    def gathering(self, kv_format: str = "bf16") -> dict[str, Any]:
        """All tokens of a key cache, as bfloat16."""
        num_tokens = self.num_seqs * self.length
        cache, scales = _side(kv_format, (num_tokens // 16, 16, 8, 128), "key")
        return dict(
            cache=cache, **scales, kv_format=kv_format, num_tokens=num_tokens, out_format="bf16",
            block_table=_meta(self.num_seqs, self.length // 16, dtype=torch.int32),
            cu_seqlens=_meta(self.num_seqs + 1, dtype=torch.int32),
        )  # fmt: skip

    def transcoding(self, source: str, target: str) -> dict[str, Any]:
        """All pages of a pool, for another vendor's readers."""
        return dict(pages=self.records(source), from_layout=source, to_layout=target, block_size=64)

    def storing(self, record: str) -> dict[str, Any]:
        """New rows into records."""
        rows = _meta(self.tokens, sum(formats.record(record).dims))
        slots = _meta(self.tokens, dtype=torch.int64)
        return dict(rows=rows, cache=self.records(record), slot_mapping=slots, kv_format=record)

    def records(self, name: str, blocks: int | None = None) -> torch.Tensor:
        """A pool of pages of 64 rows."""
        page_bytes = formats.record(name).page_bytes(64)
        return _meta(blocks or self.num_seqs * self.length // 64, page_bytes, dtype=torch.uint8)

    def quantizing(self, kv_format: str) -> Iterator[Call]:
        """New rows of 8 heads into codes and back."""
        fmt, x = formats.get(kv_format), _meta(self.tokens, 8, 128)
        number = dict(global_scale=_meta(1, dtype=torch.float32)) if fmt.global_scale else {}
        yield "quantize_kv", kv_format, dict(x=x, kv_format=kv_format, **number)
        codes = _meta(*split.codes_shape(fmt, x.shape), dtype=split.storage(fmt))
        scales = _meta(*split.scales_shape(fmt, "key", x.shape), dtype=split.scale_dtype(fmt))
        yield "dequantize_kv", kv_format, dict(codes=codes, scales=scales, kv_format=kv_format, **number)

    def swapping(self) -> dict[str, Any]:
        """Between pools of one GPU; the pairs, which come from the host, are on 'meta', too."""
        pool = _meta(self.num_seqs * self.length // 16, 16, 8, 128)
        return dict(source=pool, target=pool.clone(), block_mapping=_meta(2, 2, dtype=torch.int64))

    def calls(self) -> Iterator[Call]:
        """Every hot call."""
        sinks = dict(dim=64, group=8, window=128, sinks=_meta(64))
        yield "paged_attention", "decode, 32/8 heads of 128", self.paged(1)
        yield "paged_attention", "prefill, 32/8 heads of 128", self.paged(self.prefill)
        yield "paged_attention", "decode, window and sinks, heads of 64", self.paged(1, **sinks)
        yield "paged_attention", "decode, heads of 256, softcap", self.paged(1, group=2, dim=256, softcap=50.0)
        for kv_format in ("fp8_e4m3", "int8", "mxfp8", "nvfp4", "int4"):
            yield "paged_attention", f"decode, {kv_format}", self.paged(1, kv_format, block_size=32)
        yield "page_logits", "decode, pages of 16", self.bounding()
        yield "token_logits", "decode, pages of 16", self.looking()
        yield "sparse_attention", "decode, 32/8 heads of 128", self.sparse(1)
        yield "sparse_attention", "decode, fp8_e4m3", self.sparse(1, "fp8_e4m3")
        yield "sparse_attention", "prefill, 32/8 heads of 128", self.sparse(self.prefill // 2)
        yield "mla_attention", "decode, 128 heads", self.mla(1)
        yield "mla_attention", "decode, 16 heads", self.mla(1, 16)
        yield "mla_attention", "prefill, 128 heads", self.mla(self.prefill // 2)
        yield "mla_attention", "prefill, 16 heads", self.mla(self.prefill // 2, 16)
        yield "sparse_mla_attention", "decode, 128 heads", self.sparse_mla(1)
        yield "sparse_mla_attention", "prefill, 128 heads", self.sparse_mla(self.prefill // 2)
        yield "shared_kv_attention", "decode, 64 heads", self.shared_kv(1, "auto", "auto")
        yield "shared_kv_attention", "decode, V4", self.shared_kv(1, "v4_fp8_584", "v4_fp8_584")
        yield "shared_kv_attention", "decode, V4.1", self.shared_kv(1, "v41_fp8_528", "v41_fp4_288")
        yield "shared_kv_attention", "prefill, 64 heads", self.shared_kv(self.prefill // 2, "auto", "auto")
        yield "compress_kv", "ratio 4, overlapping", self.compressing(1, 4, True)
        yield "compress_kv", "ratio 128", self.compressing(self.prefill // 2, 128)
        yield "indexer_logits", "decode, 64 heads", self.index(1)
        yield "indexer_logits", "decode, index_fp8_132", self.index(1, "index_fp8_132")
        yield "lightning_indexer", "decode, 64 heads", self.index(1) | dict(k=self.topk)
        chosen = _meta(self.num_seqs, self.topk // 8, dtype=torch.int32)
        yield "lightning_indexer", "decode, candidates", self.index(1) | dict(k=self.topk // 4, candidates=chosen)
        blocks = dict(num_candidates=self.topk, candidate_block_size=8)
        yield "candidate_blocks", "decode, blocks of 8 keys", self.index(1) | blocks
        scores = _meta(self.num_seqs, self.index_length, dtype=torch.float32)
        yield "topk_indices", "the best scores", dict(scores=scores, k=self.topk)
        yield "reshape_and_cache", "bf16", self.writing()
        yield "reshape_and_cache", "fp8_e4m3:token_head", self.writing("fp8_e4m3:token_head")
        yield "reshape_and_cache", "nvfp4", self.writing("nvfp4")
        yield "gather_cache", "bf16", self.gathering()
        yield "gather_cache", "fp8_e4m3", self.gathering("fp8_e4m3")
        for record in ("v4_fp8_584", "v41_fp4_288"):
            yield "store_rows", record, self.storing(record)
        for pair in (("v32_fp8_656", "v32_fp8_656_ascend"), ("v4_fp8_584", "v4_fp8_608_ascend")):
            yield "transcode", " to ".join(pair), self.transcoding(*pair)
        yield from self.quantizing("fp8_e4m3:token_head")
        yield from self.quantizing("nvfp4")
        latents = dict(ckv=_meta(self.tokens, 512), kpe=_meta(self.tokens, 64))
        caches = {name: cache for name, cache in self.mla(1).items() if name in ("ckv_cache", "kpe_cache")}
        slots = _meta(self.tokens, dtype=torch.int64)
        yield "concat_and_cache_mla", "bf16", dict(**latents, **caches, slot_mapping=slots)
        cache = _meta(self.num_seqs * self.length // 16, 16, 8, 128)
        yield "copy_blocks", "2 blocks", dict(cache=cache, block_mapping=_meta(2, 2, dtype=torch.int64))
        yield "mla_project_kv", "into the cache", self.projecting()
        yield "accumulate_scores", "decode, 32/8 heads of 128", self.scoring(1)
        yield "accumulate_scores", "the last 32 of a prompt", self.scoring(self.prefill, last_queries=32)
        yield "select_tokens", "half of them, averages of 5", self.keeping()
        yield "compact_cache", "half of the rows of each head", self.compacting()
        rope = dict(x=_meta(self.tokens, 32, 128), positions=_meta(self.tokens, dtype=torch.int64))
        yield "apply_rope", "32 heads", dict(**rope, cos_sin=_meta(8192, 128, dtype=torch.float32))
        parts = dict(outs=_meta(4, self.tokens, 32, 128), lses=_meta(4, self.tokens, 32, dtype=torch.float32))
        yield "merge_attn_states", "4 parts", parts

    def every_format(self) -> Iterator[Call]:
        """Calls in each format that `calls` may not have."""
        for kv_format in quantized.PAGED:
            yield "paged_attention", f"decode in {kv_format}", self.paged(1, kv_format, block_size=32)
            yield "sparse_attention", f"decode in {kv_format}", self.sparse(1, kv_format)
            yield "token_logits", f"decode in {kv_format}", self.looking(kv_format)
            if kv_format != "int4":
                yield "reshape_and_cache", f"in {kv_format}", self.writing(kv_format)
        for kv_format in quantized.LATENT:
            yield "mla_attention", f"decode in {kv_format}", self.mla(1, None, kv_format)
        for record in formats.record_names():
            yield "store_rows", f"in {record}", self.storing(record) | dict(block_size=64)
        for record in ("v4_fp8_608_ascend", "v41_fp8_528", "v41_fp4_288_planar"):
            call = self.shared_kv(1, record, record, chosen=False)
            yield "shared_kv_attention", f"decode in {record}", call
        for record in _records_of("mla", "v32_nvfp4_352"):
            yield "sparse_mla_attention", f"decode in {record}", self.sparse_mla(1, record)
        for record in _records_of("index_key", ""):
            yield "indexer_logits", f"decode in {record}", self.index(1, record)


FULL = Shapes()
LARGE = Shapes(num_seqs=64, length=8192, prefill=256, tokens=8192)  # fills a large GPU
SMALL = Shapes(num_seqs=2, length=64, prefill=8, index_length=128, topk=16, tokens=3, mla_heads=16)
