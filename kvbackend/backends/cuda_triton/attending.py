"""Launches of triton/attention.py: what paged_attention and mla_attention share.

A sequence of up to 4 queries (speculation) counts as decode, or of as many as fit in a tile of 64 rows. Where no
sequence of a call has as many, there are parts for fewer: each is split all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...ops import _math
from . import launching
from .cached import Operand

MAX_SPLITS = 32
MIN_TOKENS = 256  # keys of the smallest split
MERGED = 128  # numbers of a head that are merged at a time
DECODE_QUERIES, DECODE_ROWS = 4, 64


@dataclass(frozen=True)
class Tiles:
    """Sizes of one kind of tile."""

    heads: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def queries(self) -> int:
        return self.block_m // self.heads

    def sizes(self) -> dict[str, int]:
        """The constants of a kernel whose rows are heads of one query."""
        return dict(BLOCK_M=self.block_m, BLOCK_N=self.block_n, num_warps=self.num_warps, num_stages=self.num_stages)

    def constants(self) -> dict[str, int]:
        return dict(HEADS=self.heads, **self.sizes())


def decode_tiles(group: int, narrow: bool) -> Tiles:
    """For sequences of few queries. `narrow`: fewer keys at a time, where each takes many registers."""
    heads = min(group, DECODE_ROWS)
    block_m = min(max(launching.power_of_two(DECODE_QUERIES * heads), 16), DECODE_ROWS)
    return Tiles(heads, block_m, block_n(narrow), 4, 1 if narrow else 2)


def prefill_tiles(group: int, dim: int, narrow: bool) -> Tiles:
    """For sequences of many queries."""
    block_m = 32 if narrow else 64 if dim > 128 else 128
    num_warps = 4 if block_m == 32 else 8
    narrow = narrow or dim > 128
    return Tiles(min(group, block_m), block_m, block_n(narrow), num_warps, 1 if narrow else 2)


def latent_tiles(heads: int, dtype: torch.dtype, quantized: bool, spare: bool) -> Tiles:
    """For heads that share rows of more than 256 numbers. `spare`: no more registers are taken than by decode.

    64 rows are what a warp group of compute capability 9.0, or a tensor core of 10.x, multiplies at once. The others
    multiply 16, and 12.0 has no shared memory for 64. Codes, which are decoded in registers, leave room on 9.0 alone.
    """
    narrow = quantized or dtype is torch.float32
    wide = {9: spare or not quantized, 10: not quantized}.get(launching.capability()[0], False)
    if wide and heads >= 64 and dtype is not torch.float32:
        return Tiles(64, 64, 32 if spare and not narrow else 16, 8, 2)
    keys = launching.keys_at_a_time(block_n(narrow) // 2, dtype)
    return Tiles(min(heads, 16), 16, keys, 4 if spare and narrow else 8, 1)


def block_n(narrow: bool) -> int:
    """Keys of up to 256 numbers at a time: what registers have room for."""
    return 32 if narrow else 64


def attend(
    q: Tensor, keys: Operand, values: Operand, kv_heads: int, value_dim: int, block_table: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor, max_seqlen_q: int, block_size: int, softmax_scale: float, causal: bool, return_lse: bool,
    window: int = -1, softcap: float = 0.0, sinks: Tensor | None = None, positions: Tensor | None = None,
    bias: Tensor | None = None, q_pe: Tensor | None = None, k_pe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [T, H, value_dim] and lse, as the ops return them. Rows of no sequence are 0 and -inf."""
    from ...triton.attention import attention

    num_tokens, num_heads, dim = q.shape
    out, lse = _math.nothing_seen(q, value_dim, return_lse)
    num_seqs, capacity = seq_lens.shape[0], block_table.shape[1] * block_size
    if 0 in (num_tokens, num_heads, num_seqs, capacity, keys.rows[0].numel()) or max_seqlen_q <= 0:
        return out, lse
    group = num_heads // kv_heads
    if dim > 256:
        few, many = (latent_tiles(group, q.dtype, keys.quantized, spare) for spare in (True, False))
    else:
        narrow = q.dtype is torch.float32 or keys.quantized or values.quantized
        few, many = decode_tiles(group, narrow), prefill_tiles(group, dim, narrow)
        if positions is not None or bias is not None:  # what each key has of its own takes registers, too
            few, many = (replace(tiles, block_n=block_n(narrow=True)) for tiles in (few, many))
    num_splits = min(MAX_SPLITS, launching.cdiv(capacity, MIN_TOKENS))
    decode_queries = min(few.queries, DECODE_QUERIES, max_seqlen_q)
    part_out, part_lse = parts(q, num_seqs, num_splits, decode_queries, value_dim)
    latent = q_pe is not None
    pe_strides = (*q_pe.stride(), *k_pe.stride()) if q_pe is not None and k_pe is not None else (0,) * 6
    args = (
        q, *q.stride(), q if q_pe is None else q_pe, *pe_strides[:3],
        *keys.rows, *keys.scales, keys.number, *values.rows, *values.scales, values.number,
        q if k_pe is None else k_pe, *pe_strides[3:],
        block_table, *block_table.stride(), seq_lens.contiguous(), cu_seqlens_q.contiguous(),
        seq_lens if positions is None else positions, *((0, 0) if positions is None else positions.stride()),
        part_lse if bias is None else bias, *((0, 0, 0) if bias is None else bias.stride()),
        part_lse if sinks is None else sinks.contiguous(), out, lse, part_out, part_lse,
        num_seqs, num_heads, group, dim, value_dim, 0 if q_pe is None else q_pe.shape[2], block_size,
        float(softmax_scale), float(softcap), window, decode_queries,
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        **keys.prefixed("K"), **values.prefixed("V"), MAX_SPLITS=MAX_SPLITS, MIN_TOKENS=MIN_TOKENS, LATENT=latent,
        CAUSAL=causal, WINDOW=window > 0, SOFTCAP=softcap > 0, POSITIONS=positions is not None, BIAS=bias is not None,
        SINKS=sinks is not None, LSE=return_lse, DOT=launching.dot_type(q.dtype),
        BLOCK_D=launching.dot_block(dim), BLOCK_V=launching.dot_block(value_dim),
        BLOCK_PE=16 if q_pe is None else launching.dot_block(q_pe.shape[2]),
    )  # fmt: skip
    launching.launch(
        attention, (num_seqs, kv_heads * launching.cdiv(group, few.heads), num_splits), *args, SPLIT=True, **constants,
        **few.constants(),
    )  # fmt: skip
    if max_seqlen_q > decode_queries:
        launching.launch(
            attention,
            (launching.cdiv(num_tokens, many.queries) + num_seqs, kv_heads * launching.cdiv(group, many.heads), 1),
            *args, SPLIT=False, **constants, **many.constants(),
        )  # fmt: skip
    merge(part_out, part_lse, out, lse, seq_lens.contiguous(), cu_seqlens_q.contiguous(), sinks)
    return out, lse


def parts(q: Tensor, num_seqs: int, num_splits: int, queries: int, dim: int) -> tuple[Tensor, Tensor]:
    """part_out [sequences, splits, queries, H, dim] and part_lse, for q [T, H, D], of sequences of so many queries."""
    part_out = torch.empty(num_seqs, num_splits, queries, q.shape[1], dim, dtype=torch.float32, device=q.device)
    return part_out, torch.empty(part_out.shape[:-1], dtype=torch.float32, device=q.device)


def merge(
    part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    sinks: Tensor | None = None, whole: bool = False,
) -> None:  # fmt: skip
    """Join parts [sequences, splits, queries, H, D] into the rows of sequences that have no more queries than that.

    whole   every split was computed; else as many as the sequence's length makes
    """
    from ...triton.attention import merge_splits

    num_seqs, num_splits, queries, num_heads, dim = part_out.shape
    tile = min(launching.power_of_two(dim), MERGED)
    launching.launch(
        merge_splits, (num_seqs, num_heads * launching.cdiv(dim, tile), queries), part_out, part_lse,
        part_lse if sinks is None else sinks.contiguous(), out, lse, seq_lens, cu_seqlens_q, num_splits, num_heads, dim,
        queries, MAX_SPLITS=MAX_SPLITS, MIN_TOKENS=MIN_TOKENS, SPLITS=launching.power_of_two(num_splits), WHOLE=whole,
        SINKS=sinks is not None, LSE=lse.numel() > 0, BLOCK_V=tile, num_warps=4,
    )  # fmt: skip
