"""Partial results of attention over disjoint keys become one."""

import triton
import triton.language as tl

from .codecs import cast


@triton.jit
def merge_attn_states(
    outs, out_n, out_t, out_h, out_d, lses, lse_n, lse_t, lse_h, sinks, out, lse, num_parts, num_rows, num_heads, dim,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, H, D] and lse [T, H], dense, of parts [N, T, H, D] and [N, T, H]. Program: ROWS rows of a token and head.

    Two passes over the parts: the largest lse, then the weighted sum in their order.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head, exists = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64), row < num_rows
    lse_at = lses + token * lse_t + head * lse_h
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for n in range(num_parts):
        part = tl.load(lse_at + tl.full((), n, tl.int64) * lse_n, mask=exists, other=0.0)
        part = tl.where(part == float("inf"), float("-inf"), part)
        largest = tl.where((part > largest) | (part != part), part, largest)  # NaN stays
    base = tl.where(largest == float("-inf"), 0.0, largest)
    d = tl.arange(0, BLOCK_D)
    total, sums = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, BLOCK_D), tl.float32)
    out_at = (outs + token * out_t + head * out_h)[:, None] + (d * out_d)[None, :]
    for n in range(num_parts):
        index = tl.full((), n, tl.int64)
        part = tl.load(lse_at + index * lse_n, mask=exists, other=0.0)
        full = exists & (part != float("inf")) & (part != float("-inf"))
        weight = tl.where(full, tl.exp(tl.where(full, part, 0.0) - base), 0.0)
        values = tl.load(out_at + index * out_n, mask=full[:, None] & (d < dim)[None, :], other=0.0)
        total += weight
        sums += values.to(tl.float32) * weight[:, None]
    some = tl.where(total == 0.0, 1.0, total)
    merged = largest + tl.log(some)
    sums = sums / some[:, None]
    if HAS_SINKS:
        sums = with_sinks(sums, merged, tl.load(sinks + head, mask=exists, other=0.0))
    inside = exists[:, None] & (d < dim)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * dim + d[None, :], cast(sums, out.dtype.element_ty), mask=inside)
    tl.store(lse + row, merged, mask=exists)


@triton.jit
def with_sinks(out, lse, sink):
    """out [rows, D] of rows whose denominators the sinks [rows] join; an empty row stays 0."""
    keep = 1.0 / (1.0 + tl.exp(sink - lse))
    return out * tl.where(lse == float("-inf"), 0.0, keep)[:, None]
