"""Conditions that several ops share; each raises ArgumentError in three parts: got; allowed: what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..arrays import need, one_of
from ..facts import View, fact

ORDERS = ("score", "position")  # of what a selection returns


def same_dtype(name: str, tensor: Any, **others: Any) -> None:
    """All in one dtype."""
    for other_name, other in others.items():
        need(
            other.dtype == tensor.dtype,
            f"{other_name} is {other.dtype} but {name} is {tensor.dtype}; they must be of one dtype: convert one",
        )


def heads_divide(num_heads: Any, kv_heads: Any, cache: str = "key_cache") -> None:
    """Every kv head serves the same number of query heads."""
    need(
        kv_heads > 0,
        f"{cache} has 0 kv heads; there must be at least one: pass this rank's heads",
    )
    need(
        num_heads % kv_heads == 0,
        f"q has {num_heads} heads and {cache} {kv_heads}; the first must be a multiple of the second: "
        f"pass the heads of one rank together",
    )


def window(value: int) -> None:
    need(
        value == -1 or value > 0,
        f"window is {value}; it must be -1 (none) or at least 1 (the query itself counts): pass -1 for no window",
    )


def softcap(value: float) -> None:
    need(
        value == 0 or 1e-30 <= value < float("inf"),
        f"softcap is {value}; it must be 0 (none), or positive and finite, from 1e-30: pass 0.0 for no softcap",
    )


def selection(k: Any, order: str) -> None:
    need(k >= 1, f"k is {k}; it must be at least 1: pass how many to select")
    need(order in ORDERS, f"order is {order!r}; it must be {one_of(ORDERS)}: choose one")


def even_rotary(width: Any, owner: str) -> None:
    need(width % 2 == 0, f"{owner} rotates {width} dims; pairs are rotated, so it must be even: pass cos then sin")


def rope_at_read(rope_cos_sin: Any, q: Any) -> None:
    """A table for keys that are rotated as they are read, if one is given."""
    if rope_cos_sin is None:
        return
    even_rotary(rope_cos_sin.shape[1], "rope_cos_sin")
    need(
        rope_cos_sin.shape[1] <= q.shape[2],
        f"rope_cos_sin rotates {rope_cos_sin.shape[1]} dims but keys have {q.shape[2]}; it must be at most that: "
        f"pass the table of this model",
    )


def rotary_table(name: str, tensor: Any, cos_sin: Any) -> None:
    """cos_sin holds pairs of columns, in float32 or in the dtype of what it rotates."""
    need(
        cos_sin.dtype == torch.float32 or cos_sin.dtype == tensor.dtype,
        f"cos_sin is {cos_sin.dtype} but {name} is {tensor.dtype}; it must be torch.float32 or {tensor.dtype}: "
        f"keep the table in float32",
    )
    even_rotary(cos_sin.shape[1], "cos_sin")


def shape_is(name: str, tensor: Any, shape: Iterable[Any], what: str, **others: Any) -> None:
    """A tensor whose rank depends on the call has this shape; counts are expressions of the others' metadata."""
    shape = tuple(shape)
    got = tensor._tensor.shape if isinstance(tensor, View) else tensor.shape
    message = (
        f"{name} has shape {list(got)}; {what}, takes [{', '.join(map(str, shape))}]: pass scales of that granularity "
        f"or choose the format that has these"
    )
    need(tensor.ndim == len(shape), message)
    for dim, size in enumerate(shape):
        found = f"(*{name}.shape, 0, 0, 0, 0)[{dim}]"  # zeros: other calls may have fewer dims
        is_text = isinstance(size, str)
        rest = fact(f"{found} - {size}" if is_text else found, **{name: tensor}, **others) - (0 if is_text else size)
        need(rest == 0, message)


# values: asked under KVBACKEND_CHECK=values, where waiting for the device is wanted


def positive(name: str, scale: Tensor) -> None:
    """Every multiplier is positive and finite."""
    wrong = ~((scale > 0) & (scale < torch.inf))
    need(
        not bool(wrong.any()),
        f"{name} holds {scale[wrong].tolist()[:1]} among its {scale.numel()} numbers; all must be positive and finite: "
        f"calibrate it again",
    )


def slots_within(name: str, slots: Tensor, cache: Tensor) -> None:
    """Slots are -1 or name a row of the cache."""
    within(name, slots, -1, cache.shape[0] * cache.shape[1], "slot", "-1 skips a token")


def within(name: str, tensor: Tensor, low: int, high: int, what: str, hint: str) -> None:
    """Every value in [low, high)."""
    wrong = (tensor < low) | (tensor >= high)
    if bool(wrong.any()):
        index = int(wrong.flatten().nonzero()[0])
        got = tensor.flatten()[index].item()
        need(
            False, f"{name} holds {what} {got} at index {index}; it must be in [{low}, {high}); {hint}: check its maker"
        )


def positions_within(positions: Tensor, cos_sin: Tensor) -> None:
    """Positions are -1 or have a row in the table."""
    within("positions", positions, -1, cos_sin.shape[0], "position", "-1 is no token, and cos_sin has no more rows")


def block_pairs(block_mapping: Tensor, num_sources: int, num_targets: int, one_pool: bool) -> None:
    """Pairs name blocks that exist, no target twice and, within one pool, no target that is a source too."""
    sources, targets = block_mapping.unbind(1)
    within("block_mapping[:, 0]", sources, -1, num_sources, "source block", "-1 skips a pair")
    within("block_mapping[:, 1]", targets, -1, num_targets, "target block", "-1 skips a pair")
    used = ((sources >= 0) & (targets >= 0)).tolist()
    pairs = [pair for pair, is_used in zip(block_mapping.tolist(), used, strict=True) if is_used]
    seen = {source for source, _ in pairs} if one_pool else set()
    for index, (_, target) in enumerate(pairs):
        need(
            target not in seen,
            f"block_mapping writes block {target} in its used pair {index}, which is read or written elsewhere too; "
            f"copies have no order among themselves: split the pairs over two calls",
        )
        seen.add(target)


def batch(
    block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, num_tokens: int, cache: Tensor
) -> None:
    """The values that describe a varlen batch over a paged cache."""
    paged_batch(block_table, seq_lens, cu_seqlens_q, max_seqlen_q, num_tokens, cache.shape[0], cache.shape[1])


def paged_batch(
    block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, num_tokens: int, num_blocks: int,
    block_size: int, compress_ratio: int = 1,
) -> None:  # fmt: skip
    """As `batch`, where a page's rows are not a dim and each stands for `compress_ratio` tokens."""
    capacity = (block_table.shape[1] * block_size + 1) * compress_ratio - 1
    within("seq_lens", seq_lens, 0, capacity + 1, "length", f"block_table covers {capacity} tokens")
    queries(seq_lens, cu_seqlens_q, num_tokens, max_seqlen_q)
    blocks_in_use("block_table", block_table, seq_lens // compress_ratio, num_blocks, block_size)


def queries(seq_lens: Tensor, cu_seqlens_q: Tensor, num_tokens: int, max_seqlen_q: int | None = None) -> None:
    """Queries are the last tokens of their sequences."""
    running_sum("cu_seqlens_q", cu_seqlens_q, num_tokens)
    lengths = cu_seqlens_q.diff()
    need(  # a length of 0 is how graph padding marks a sequence that is not there
        bool(((lengths <= seq_lens) | (seq_lens == 0)).all()),
        f"cu_seqlens_q names up to {max((lengths - seq_lens).tolist(), default=0)} more query tokens than seq_lens "
        f"counts in the cache; seq_lens counts the current tokens too: add them",
    )
    need(
        max_seqlen_q is None or lengths.numel() == 0 or int(lengths.max()) <= max_seqlen_q,
        f"max_seqlen_q is {max_seqlen_q}; the longest query of cu_seqlens_q has {max(lengths.tolist(), default=0)} "
        f"tokens: pass at least that",
    )


def blocks_in_use(name: str, block_table: Tensor, seq_lens: Tensor, num_blocks: int, block_size: int) -> None:
    """Table entries that a sequence reaches are -1 or a block of the cache."""
    starts = torch.arange(block_table.shape[1], device=block_table.device) * block_size
    used = torch.where(starts[None] < seq_lens[:, None], block_table, -1)
    within(name, used, -1, num_blocks, "block", "-1 is no block")


def running_sum(name: str, cu_seqlens: Tensor, num_tokens: int) -> None:
    """Starts at 0, never falls, ends within the tokens."""
    need(int(cu_seqlens[0]) == 0, f"{name} starts with {int(cu_seqlens[0])}; it must start with 0: prepend a 0")
    need(bool((cu_seqlens.diff() >= 0).all()), f"{name} falls; a running sum never does: pass cumulated lengths")
    need(
        int(cu_seqlens[-1]) <= num_tokens,
        f"{name} ends with {int(cu_seqlens[-1])} but there are {num_tokens} tokens; it must not pass them: pass all",
    )
