"""Dense attention over pages in memory: decode and prefill of a GQA layer, decode of an MLA layer.

Block tables rotate over a pool that no cache holds, as the layers of a model do. Bytes are the keys and values of all
tokens, each once. torch attends to copies in buffers that exist already, which is faster than making them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import formats
from ..ops import registry
from ..ops._samples import Maker
from . import peers
from .limits import matrix_limit
from .pages import batches, filled
from .timing import Case

POOL_BYTES = 1 << 30
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
RANK, ROPE, MLA_SCALE = 512, 64, 192**-0.5
SIZES = ((1, 1024), (1, 8192), (1, 32768), (8, 8192), (32, 1024))  # sequences, tokens of each
PREFILL = (2048, 8192)

Sizes = Sequence[tuple[int, int]]  # at least four


def gqa(make: Maker, *, others: bool, sizes: Sizes = SIZES, blocks: Iterable[int] = (16, 128)) -> Iterator[Case]:
    """Decode, one query a sequence, in bfloat16 and at one size in float32."""
    for block_size in blocks:
        pools = Pools(block_size, torch.bfloat16)
        for count, context in sizes:
            yield decode(make, pools, count, context, others)
    yield decode(make, Pools(16, torch.float32), *sizes[3], others)
    yield from _coded(make, *sizes[1])
    yield from _prefill(make)
    yield _small(make)


def mla(make: Maker, *, others: bool, sizes: Sizes = SIZES[:4], heads: Iterable[int] = (16, 128)) -> Iterator[Case]:
    """Decode in the latent space, blocks of 64."""
    pages = latent_pages()
    for count in heads:
        for sequences, context in sizes:
            yield decode_mla(make, pages, count, sequences, context, others)


def latent_pages() -> Tensor:
    """A pool of MLA rows, in blocks of 64."""
    return filled(POOL_BYTES // (2 * 64 * (RANK + ROPE)), 64, RANK + ROPE, dtype=torch.bfloat16)


def decode_mla(make: Maker, pages: Tensor, heads: int, sequences: int, context: int, others: bool) -> Case:
    """mla_attention of one query a sequence."""
    block_size, width = pages.shape[1:]
    q = make.randn(sequences, heads, width)
    other = dict(
        q_nope=q[..., :RANK], q_pe=q[..., RANK:], ckv_cache=pages[..., :RANK], kpe_cache=pages[..., RANK:],
        softmax_scale=MLA_SCALE,
    )  # fmt: skip
    calls = [dict(other, **batch) for batch in batches(make, pages, sequences, context)]
    buffer = pages.new_empty(sequences, -(-context // block_size) * block_size, width)
    named: dict[str, peers.Peer] = {"torch index_select, matmul": gathered_mla(pages, q, buffer, context)}
    if others:
        named |= peers.mla_decode(pages, q, RANK, MLA_SCALE)
    return Case(
        "mla_attention", f"decode {sequences} x {context}, {heads} heads", calls, peers=named,
        moved_bytes=2 * sequences * context * width, operations=2 * sequences * context * heads * (width + RANK),
        limit="read_gbs" if heads == 16 else matrix_limit(),
    )  # fmt: skip


class Pools:
    """Key and value blocks of the benchmarks, filled; vLLM's copy of them where it is asked for."""

    def __init__(self, block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        row = KV_HEADS * HEAD_DIM * dtype.itemsize
        shape = POOL_BYTES // (2 * block_size * row), block_size, KV_HEADS, HEAD_DIM
        self.key, self.value = (filled(*shape, dtype=dtype) for _ in range(2))
        self.token_bytes = 2 * row

    @cached_property
    def vllm(self) -> peers.VllmPages:
        return peers.VllmPages(self.key, self.value)


def decode(make: Maker, pools: Pools, sequences: int, context: int, others: bool) -> Case:
    """paged_attention of one query a sequence."""
    q = make.randn(sequences, HEADS, HEAD_DIM).to(pools.key.dtype)
    other = dict(q=q, key_cache=pools.key, value_cache=pools.value, softmax_scale=HEAD_DIM**-0.5)
    calls = [dict(other, **batch) for batch in batches(make, pools.key, sequences, context)]
    named: dict[str, peers.Peer] = {"torch index_select, SDPA": _gathered(pools, q, context, _sdpa)}
    if others:
        named |= peers.gqa_decode(pools.vllm, pools.key, pools.value, q)
        if (sequences, context) == (1, 8192):
            named["torch index_select, FlexAttention"] = _gathered(pools, q, context, peers.flex_attention())
    return Case(
        "paged_attention", f"decode {sequences} x {context}, block {pools.block_size}", calls, pools.key.dtype,
        moved_bytes=sequences * context * pools.token_bytes, limit="paged_read_gbs", peers=named,
        operations=4 * sequences * context * HEADS * HEAD_DIM,
    )  # fmt: skip


def _sdpa(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, key, value, enable_gqa=True)


def _gathered(pools: Pools, q: Tensor, context: int, attend: Callable[..., Tensor]) -> peers.Peer:
    """Copy the sequences' blocks into buffers, then attend to those."""
    sequences, columns = len(q), -(-context // pools.block_size)
    rows = columns * pools.block_size
    key, value = (pools.key.new_empty(sequences * columns, *pools.key.shape[1:]) for _ in range(2))

    def run(call: dict[str, Any]) -> Tensor:
        for buffer, pool in ((key, pools.key), (value, pools.value)):
            torch.index_select(pool, 0, call["block_table"].flatten(), out=buffer)
        copied = (buffer.view(sequences, rows, KV_HEADS, HEAD_DIM)[:, :context] for buffer in (key, value))
        return attend(q[:, :, None], *(part.transpose(1, 2) for part in copied))[:, :, 0]

    return run


def gathered_mla(pages: Tensor, q: Tensor, buffer: Tensor, context: int) -> peers.Peer:
    """Copy the sequences' blocks into `buffer`, rows of [sequences, rows, width]; then two products of matrices."""
    blocks, rows = buffer.view(-1, *pages.shape[1:]), buffer[:, :context]

    def run(call: dict[str, Any]) -> Tensor:
        torch.index_select(pages, 0, call["block_table"].flatten(), out=blocks)
        weights = torch.matmul(q, rows.transpose(1, 2)).float().mul_(call["softmax_scale"]).softmax(-1)
        return torch.matmul(weights.to(q.dtype), rows[..., :RANK])

    return run


def _coded(make: Maker, sequences: int, context: int) -> Iterator[Case]:
    """Decode over codes beside decode over bfloat16, of the same sizes."""
    plain = Pools(16, torch.bfloat16)
    num_blocks = plain.key.shape[0]
    q = make.randn(sequences, HEADS, HEAD_DIM)
    attend = registry["paged_attention"]
    asked = dict(q=q, softmax_scale=HEAD_DIM**-0.5)
    for kv_format in ("fp8_e4m3:token_head", "int8", "fp4_e2m1"):
        few = min(num_blocks, 1024)
        sides = {}
        for side, letter in (("key", "k"), ("value", "v")):
            coded = make.codes(kv_format, (few, 16, KV_HEADS, HEAD_DIM), role=side)
            for name, part in (("_cache", "cache"), ("_scale_cache", "scale_cache")):
                tensor = _finite(coded[part]) if part == "cache" else coded[part]
                repeated = tensor.repeat(-(-num_blocks // few), *[1] * (tensor.dim() - 1))[:num_blocks]
                sides[f"{side}_cache" if name == "_cache" else f"{letter}_scale_cache"] = repeated
        stored = 2 * formats.get(kv_format).bytes_per_token(KV_HEADS, HEAD_DIM)
        calls = [
            dict(asked, **batch, **sides, kv_format=kv_format) for batch in batches(make, plain.key, sequences, context)
        ]

        def bfloat16(call: dict[str, Any]) -> None:  # no result: random codes stand for other numbers
            batch = {name: call[name] for name in ("block_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q")}
            attend(**asked, **batch, key_cache=plain.key, value_cache=plain.value)

        yield Case(
            "paged_attention", f"decode {sequences} x {context}, block 16", calls, kv_format=kv_format,
            moved_bytes=int(sequences * context * stored), limit="paged_read_gbs", peers={"our bfloat16": bfloat16},
            operations=4 * sequences * context * HEADS * HEAD_DIM,
        )  # fmt: skip


def _finite(codes: Tensor) -> Tensor:
    """Random codes, 0 in place of NaN: a cache seldom holds one, and kernels may be slower where it does."""
    codes.view(torch.uint8)[codes.float().isnan()] = 0
    return codes


def _prefill(make: Maker) -> Iterator[Case]:
    """A whole prompt over its own pages, and torch over contiguous keys and values."""
    for tokens in PREFILL:
        num_blocks = tokens // 16
        q, key, value = (make.randn(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        order = make.permutation(num_blocks)
        pages = [torch.empty_like(rows.view(num_blocks, 16, KV_HEADS, HEAD_DIM)) for rows in (key, value)]
        for cached, rows in zip(pages, (key, value), strict=True):
            cached[order] = rows.view_as(cached)
        call = dict(
            q=q, key_cache=pages[0], value_cache=pages[1], block_table=order[None].int(), max_seqlen_q=tokens,
            seq_lens=make.ints([tokens]), cu_seqlens_q=make.ints([0, tokens]), softmax_scale=HEAD_DIM**-0.5,
        )  # fmt: skip
        parts = [rows.transpose(0, 1)[None] for rows in (q, key, value)]

        def sdpa(_: dict[str, Any], parts: list[Tensor] = parts) -> Tensor:
            out = scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        yield Case(
            "paged_attention", f"prefill {tokens}, causal", [call], operations=2 * tokens**2 * HEADS * HEAD_DIM,
            limit=matrix_limit(), peers={"torch SDPA, contiguous": sdpa},
        )  # fmt: skip


def _small(make: Maker) -> Case:
    """What a call costs when there is little to do."""
    pages = [make.randn(8, 16, KV_HEADS, HEAD_DIM) for _ in range(2)]
    call = dict(
        q=make.randn(1, HEADS, HEAD_DIM), key_cache=pages[0], value_cache=pages[1], softmax_scale=HEAD_DIM**-0.5,
        block_table=make.permutation(8)[None].int(), seq_lens=make.ints([128]), cu_seqlens_q=make.ints([0, 1]),
        max_seqlen_q=1,
    )  # fmt: skip
    return Case("paged_attention", "decode 1 x 128, in caches", [call])
