"""Arithmetic that several references share. Plain torch, no host synchronization: it may run on any device.

Padding is `-1` and must be skipped without asking the device which entries are -1; so masks and clamped indices stand
where one would write a boolean index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arrays import need


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """References accumulate in float32, and in float64 where the input is float64."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def as_bytes(tensor: Tensor) -> Tensor:
    """A float8 tensor as uint8, others as they are: torch can neither index nor mask every float8 dtype."""
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """cache [nb, bs, *row][slot] = rows [N, *row]; rows whose slot is -1 are skipped."""
    if rows.shape[0] == 0 or 0 in cache.shape[:2]:
        return
    if cache.dtype == rows.dtype:
        cache, rows = as_bytes(cache), as_bytes(rows)
    slots = slots.long()
    block_size = cache.shape[1]
    used = slots >= 0
    # A skipped row repeats the first used one, to the same slot with the same value. With none used, slot 0 keeps what
    # it has.
    first = used.to(torch.int8).argmax(0, keepdim=True)  # indexing with a number would ask the device for it
    slots = torch.where(used, slots, slots.index_select(0, first).clamp(min=0))
    rows = torch.where(expand(used, rows), rows, rows.index_select(0, first))
    block, offset = slots // block_size, slots % block_size
    rows = torch.where(expand(used.any(), rows), rows.to(cache.dtype), cache[block, offset])
    cache[block, offset] = rows


def write_blocks(target: Tensor, target_blocks: Tensor, source: Tensor, source_blocks: Tensor) -> None:
    """target [nb, *page][target_blocks] = source [mb, *page][source_blocks]; pairs with a -1 are skipped."""
    if target_blocks.shape[0] == 0 or source.shape[0] == 0:
        return
    # as integers: torch cannot index every dtype of a cache (float8_e8m0fnu, float4_e2m1fn_x2)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
    target, source = target.view(bits), source.view(bits)
    used = (target_blocks >= 0) & (source_blocks >= 0)
    pages = source[torch.where(used, source_blocks, 0).long().to(source.device)].to(target.device)
    # pages as rows of a cache with one slot a block
    write_rows(target.unsqueeze(1), torch.where(used, target_blocks, -1).to(target.device), pages)


def gather_rows(cache: Tensor, block_table: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence's rows, cache [nb, bs, *row] through block_table [max_blocks], and which of them exist.

    Returns rows [max_blocks * bs, *row], zeros where there is no token, and exists [max_blocks * bs] bool: within
    `length` and in a block that is not -1. Entries of the table beyond `length` are not looked at.
    """
    num_blocks, block_size = cache.shape[:2]
    position = torch.arange(block_table.shape[0] * block_size, device=cache.device)
    if block_size == 0:
        return cache.new_zeros(0, *cache.shape[2:]), position.bool()
    starts = position[::block_size]
    in_use = (starts < length) & (block_table >= 0)
    exists = (position < length) & in_use.repeat_interleave(block_size)
    if num_blocks == 0:
        return cache.new_zeros(len(position), *cache.shape[2:]), torch.zeros_like(exists)
    rows = as_bytes(cache)[torch.where(in_use, block_table, 0).long()].flatten(0, 1)  # [max_blocks * bs, *row]
    return rows.masked_fill(~expand(exists, rows), 0).view(cache.dtype), exists


@dataclass(frozen=True)
class Sequence:
    """One sequence of a varlen batch, its queries padded to the longest."""

    index: int
    tokens: Tensor  # [max_seqlen_q] int64: which rows of q; padding repeats the last row of q
    positions: Tensor  # [max_seqlen_q] int64: index within the sequence; negative where there is no query
    length: Tensor  # [] tokens in the cache


def sequences(cu_seqlens_q: Tensor, seq_lens: Tensor, max_seqlen_q: int, num_tokens: int) -> Iterator[Sequence]:
    """The sequences of a batch. Queries are the last ones of each sequence (bottom-right alignment)."""
    offsets = torch.arange(min(max_seqlen_q, num_tokens), device=seq_lens.device)
    for index in range(seq_lens.shape[0]):
        start, end = cu_seqlens_q[index].long(), cu_seqlens_q[index + 1].long()
        length = seq_lens[index].long()
        positions = torch.where(offsets < end - start, length - (end - start) + offsets, -1)
        yield Sequence(index, (start + offsets).clamp(0, num_tokens - 1), positions, length)


def query_positions(
    cu_seqlens_q: Tensor, seq_lens: Tensor, max_seqlen_q: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Of each row of q: its sequence [T] int64, and its index within it [T] int64, negative where there is no query."""
    token, starts = torch.arange(num_tokens, device=seq_lens.device), cu_seqlens_q.long()
    sequence = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, seq_lens.shape[0] - 1)
    offset = token - starts[sequence]
    position = seq_lens.long()[sequence] - (starts[sequence + 1] - token)
    return sequence, torch.where((token < starts[-1]) & (offset < max_seqlen_q), position, -1)


def unpad(padded: list[Tensor], cu_seqlens_q: Tensor, num_tokens: int, empty: float) -> Tensor:
    """[B] of [max_seqlen_q, ...] back to [T, ...]; rows of no sequence become `empty`."""
    rows = torch.stack(padded)  # [B, max_seqlen_q, ...]
    token = torch.arange(num_tokens, device=rows.device)
    index = (torch.searchsorted(cu_seqlens_q.long(), token, right=True) - 1).clamp(0, rows.shape[0] - 1)
    offset = token - cu_seqlens_q.long()[index]
    out = rows[index, offset.clamp(0, rows.shape[1] - 1)]
    inside = (token < cu_seqlens_q[-1]) & (offset < rows.shape[1])
    return torch.where(expand(inside, out), out, empty)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    softmax_scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(cap(q k^T * scale) + bias) v over the allowed keys.

    q [n, H, D], k [S, Hk, D], v [S, Hk, Dv], allowed [n, S] bool, bias [S, Hk]; query head h reads kv head h // (H/Hk).
    Returns out [n, H, Dv] and lse [n, H], natural log; a row with no allowed key gives 0 and -inf.
    """
    num_tokens, num_heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(num_tokens, kv_heads, num_heads // max(kv_heads, 1), dim)
    logits = torch.einsum("nkgd,skd->nkgs", grouped, k) * softmax_scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.mT[None, :, None]  # [Hk, S] over n and g
    masked = ~allowed[:, None, None]  # [n, 1, 1, S]
    lse = logits.masked_fill(masked, -torch.inf).logsumexp(-1)  # [n, Hk, G]
    weights = probabilities(logits, lse[..., None], masked)
    v = v.masked_fill(~allowed.any(0)[:, None, None], 0)  # 0 * NaN is NaN, and no query sees these
    out = torch.einsum("nkgs,skd->nkgd", weights, v)
    return out.reshape(num_tokens, num_heads, v.shape[-1]), lse.reshape(num_tokens, num_heads)


def probabilities(logits: Tensor, lse: Tensor, masked: Tensor) -> Tensor:
    """e^(logits - lse), 0 where masked. All are 0 where lse is -inf: whose logits all are -inf sees no key."""
    base = lse.masked_fill(lse == -torch.inf, 0)
    return (logits - base).exp().masked_fill(masked, 0)  # not nan_to_num: real NaNs stay


def nothing_seen(q: Tensor, value_dim: int, return_lse: bool) -> tuple[Tensor, Tensor]:
    """What attention of queries q [T, H, D] that see no key is: out [T, H, value_dim] of 0, and lse [T, H] of -inf."""
    rows = q.shape[:2]
    lse = q.new_full(rows if return_lse else (0,), -torch.inf, dtype=torch.float32)
    return q.new_zeros(*rows, value_dim), lse


def blank(out: Tensor, lse: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """out [T, H, Dv] and lse [T, H], or empty, with that in the rows [T] bool that see no key, whatever is there."""
    out = out.masked_fill(rows[:, None, None], 0)
    return out, lse.masked_fill(rows[:, None], -torch.inf) if lse.numel() else lse


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add each head's sink logit to the denominator: out [..., H, Dv], lse [..., H], sinks [H]."""
    keep = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sinks.to(lse.dtype)))
    return out * keep[..., None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of x [..., rotary_dim] by angles whose cos and sin are [..., rotary_dim / 2]."""
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, -1)
    turned = first * cos - second * sin, first * sin + second * cos
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def rotate_at(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool = False) -> Tensor:
    """x [T, H, rotary_dim] turned by the angles of its positions [T], in x's dtype; position -1 leaves it as it is."""
    dtype, half = compute_dtype(x), cos_sin.shape[1] // 2
    angles = cos_sin[positions.long().clamp(min=0)].to(dtype)[:, None]  # [T, 1, rotary_dim]
    cos, sin = angles[..., :half], angles[..., half:]
    turned = rotate(x.to(dtype), cos, -sin if inverse else sin, interleaved).to(x.dtype)
    return torch.where(expand(positions >= 0, x), turned, x)


def gather_slots(
    block_table: Tensor, cu_seqlens: Tensor, num_tokens: int, seq_starts: Tensor | None, block_size: int
) -> Tensor:
    """The slot of each of num_tokens rows that run through the sequences in order: [num_tokens] int64.

    Row i of sequence b is its position seq_starts[b] + i - cu_seqlens[b]; rows of no sequence, and positions in no
    block, get -1.
    """
    row = torch.arange(num_tokens, device=block_table.device)
    num_seqs, max_blocks = block_table.shape
    if num_seqs == 0 or max_blocks == 0 or block_size == 0:
        return torch.full_like(row, -1)
    cu_seqlens = cu_seqlens.long()
    index = (torch.searchsorted(cu_seqlens, row, right=True) - 1).clamp(0, num_seqs - 1)
    position = row - cu_seqlens[index]
    if seq_starts is not None:
        position = position + seq_starts.long()[index]
    logical = position // block_size
    inside = (row < cu_seqlens[-1]) & (logical >= 0) & (logical < max_blocks)
    block = block_table[index, torch.where(inside, logical, 0)].long()
    return torch.where(inside & (block >= 0), block * block_size + position % block_size, -1)


def check_cu_seqlens(cu_seqlens: Tensor, name: str) -> None:
    """On the host, where a look costs nothing, a running sum that does not start at 0 is refused at once."""
    if cu_seqlens.device.type == "cpu":
        first = int(cu_seqlens[0])
        need(
            first == 0,
            f"{name} starts with {first}; it is the running sum of lengths and must start with 0: prepend a 0",
        )


def expand(mask: Tensor, like: Tensor) -> Tensor:
    """mask [N] with trailing dims of size 1, as many as `like` has."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - mask.dim()))
