"""What CANN's own torch ops do and refuse, as their documentation says: the companion of `vendor.py`.

Read: ops-transformer's torch_extension/cann_ops_transformer/docs of branch 9.1.0 (06be6c2c, 2026-07-21) and of master
(57781440, 2026-08-21), and the tests beside sparse_flash_mla there. Our reading, not Huawei's code. A preparing call
returns a fingerprint of what it was told, which the call itself must have been told too: the documents leave anything
else undefined.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvbackend.backends.npu import target, vendor_ops
from kvbackend.backends.npu.target import A2_A3
from tests.npu.vendor import UNDEFINED_POSITION, attend, dense, int32, need, same_dtype, within

METADATA = 1024
LEAST = torch.finfo(torch.float32).min


def fingerprint(*told: Any) -> Tensor:
    """[1024] int32 that says what a preparing call was told."""
    plain = [part.tolist() if isinstance(part, Tensor) else part for part in told]
    return torch.full((METADATA,), zlib.crc32(repr(plain).encode()) - 2**31, dtype=torch.int32)


def prepared(metadata: Tensor | None, *told: Any) -> None:
    int32(metadata=metadata)
    need(torch.equal(metadata, fingerprint(*told)), "metadata are of another call")


def paged(name: str, kv: Tensor, table: Tensor | None, lens: Tensor | None, sequences: int) -> None:
    """Pages [nb, bs, 1, *], which may lie apart, and the blocks and lengths of each sequence."""
    int32(**{f"{name}_block_table": table, f"seqused_{name}": lens})
    dense(**{f"{name} page": kv[0], f"{name}_block_table": table, f"seqused_{name}": lens})
    need(kv.dim() == 4 and kv.shape[2] == 1 and 0 not in kv.shape, f"{name} is [blocks, rows, 1, numbers]")
    need(table.shape[0] == sequences and table.shape[1] > 0 and lens.shape == (sequences,), f"{name}: the batch")
    need(table.shape[1] * kv.shape[1] >= max(lens.tolist()), f"{name}: the block table is too short")


def running_sum(cu_seqlens_q: Tensor | None, num_tokens: int) -> list[int]:
    int32(cu_seqlens_q=cu_seqlens_q)
    dense(cu_seqlens_q=cu_seqlens_q)
    sums = cu_seqlens_q.tolist()
    # the documents want the last to be num_tokens; rows past it are relied on to be ignored (docs/ascend.md)
    need(sums[0] == 0 and sums == sorted(sums) and sums[-1] <= num_tokens, "cu_seqlens_q is a running sum from 0")
    return sums


def rows_of(kv: Tensor, table: Tensor, positions: list[int] | range) -> Tensor:
    """[n, numbers] of one sequence."""
    position = torch.tensor(positions, dtype=torch.int64)
    block = table[position // kv.shape[1]].long()
    need(((block >= 0) & (block < kv.shape[0])).all(), "a block outside the cache")
    return kv[block, position % kv.shape[1], 0]


def as_bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)  # torch does not join fp8


# ------------------------------------------------------------------------------------------- attention to shared rows


def shared_metadata(
    vendor, num_heads_q, num_heads_kv, head_dim, cu_seqlens_q, seqused_ori_kv, seqused_cmp_kv, cmp_residual_kv,
    batch_size, max_seqlen_q, cmp_topk, cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right, layout_q,
    layout_kv, has_ori_kv, has_cmp_kv, quant=(), ori_topk=0, **unused,
):  # fmt: skip
    need(all(value in (None, 0) for value in unused.values()), f"not for these layouts: {unused}")
    need((num_heads_kv, ori_topk, has_ori_kv) == (1, 0, True), "one kv head, no list of the window's rows")
    within(vendor, "num_heads", num_heads_q)
    within(vendor, "dim", head_dim)
    lens = cu_seqlens_q.diff().tolist()
    need(batch_size == len(lens) and max_seqlen_q == max(lens), "batch_size or max_seqlen_q is not the batch's")
    return fingerprint(
        num_heads_q, head_dim, cu_seqlens_q, seqused_ori_kv, seqused_cmp_kv, cmp_residual_kv, cmp_topk or 0, cmp_ratio,
        ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right, layout_q, layout_kv, has_cmp_kv, quant,
    )  # fmt: skip


def shared_attention(
    vendor, read, q, ori_kv, cmp_kv, cmp_sparse_indices, ori_block_table, cmp_block_table, cu_seqlens_q,
    seqused_ori_kv, seqused_cmp_kv, cmp_residual_kv, sinks, metadata, softmax_scale, cmp_ratio, ori_mask_mode,
    cmp_mask_mode, ori_win_left, ori_win_right, layout_q, layout_kv, topk_value_mode, return_softmax_lse, quant=(),
    **unused,
):  # fmt: skip
    """`read` makes rows of numbers [D] of what a page holds."""
    old = target.current().family in A2_A3
    need(all(value is None for value in unused.values()), f"not supported: {unused}")
    need((layout_q, layout_kv, topk_value_mode) == ("TND", "PA_BBND", 1), f"layouts {layout_q!r}, {layout_kv!r}")
    need(q.dim() == 3 and 0 not in q.shape, "q is [T, N, D]")
    dense(q=q)
    num_tokens, num_heads, dim = q.shape
    for name, value in (("dtype", q.dtype), ("dim", dim), ("num_heads", num_heads), ("block_size", ori_kv.shape[1])):
        within(vendor, name, value)
    sums = running_sum(cu_seqlens_q, num_tokens)
    sequences = len(sums) - 1
    paged("ori_kv", ori_kv, ori_block_table, seqused_ori_kv, sequences)
    need(ori_mask_mode == 4 if old else ori_mask_mode in (3, 4), f"ori_mask_mode {ori_mask_mode} is not modelled")
    need(ori_win_right == 0 and ori_win_left >= -1, "the window's sides")
    if any(limit.name == "window" for limit in vendor.limits):
        within(vendor, "window", ori_win_left + 1)
    int_lists = cmp_sparse_indices is not None
    if cmp_kv is None:
        need(cmp_mask_mode == 0 and cmp_ratio == 1, "without cmp_kv, mode 0 and ratio 1")
        need(all(value is None for value in (cmp_block_table, seqused_cmp_kv, cmp_residual_kv)), "cmp_kv is not given")
        need(not int_lists, "indices without cmp_kv")
    else:
        paged("cmp_kv", cmp_kv, cmp_block_table, seqused_cmp_kv, sequences)
        same_dtype(ori_kv, cmp_kv)
        within(vendor, "block_size", cmp_kv.shape[1])
        within(vendor, "ratio_chosen" if int_lists else "ratio_all", cmp_ratio)
        int32(cmp_residual_kv=cmp_residual_kv)
        need(cmp_mask_mode == 3 and cmp_residual_kv.shape == (sequences,), "cmp_kv wants mode 3 and residuals")
        left = cmp_residual_kv.tolist()
        need(all(0 <= residual < cmp_ratio for residual in left), "a residual is less than the ratio")
        whole = (seqused_cmp_kv * cmp_ratio + cmp_residual_kv).tolist()
        need(whole == seqused_ori_kv.tolist(), "entries * ratio + residual must be the sequence's length")
    if int_lists:
        int32(cmp_sparse_indices=cmp_sparse_indices)
        dense(cmp_sparse_indices=cmp_sparse_indices)
        need(cmp_sparse_indices.dim() == 3 and cmp_sparse_indices.shape[:2] == (num_tokens, 1), "indices are [T, 1, k]")
        topk = cmp_sparse_indices.shape[2]
        need(topk in (512, 1024) if old else topk > 0, f"{topk} indices")
    need(sinks is not None and sinks.dtype is torch.float32 and sinks.shape == (num_heads,), "sinks are mandatory")
    prepared(
        metadata, num_heads, dim, cu_seqlens_q, seqused_ori_kv, seqused_cmp_kv, cmp_residual_kv,
        cmp_sparse_indices.shape[2] if int_lists else 0, cmp_ratio, ori_mask_mode, cmp_mask_mode, ori_win_left,
        ori_win_right, layout_q, layout_kv, cmp_kv is not None, quant,
    )  # fmt: skip
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    lse = torch.full((1, num_tokens, num_heads), torch.nan)
    for sequence, (start, end) in enumerate(pairwise(sums)):
        length = seqused_ori_kv[sequence].item()
        for token in range(start, end):
            own = length - (end - token)
            oldest = 0 if ori_mask_mode == 3 or ori_win_left == -1 else max(own - ori_win_left, 0)
            rows = rows_of(ori_kv, ori_block_table[sequence], range(oldest, own + 1))
            if cmp_kv is not None:
                visible = (own + 1) // cmp_ratio if own >= 0 else 0
                chosen = range(visible)
                if int_lists:
                    listed = cmp_sparse_indices[token, 0].tolist()
                    chosen = [index for index in listed if index >= 0]
                    need(
                        listed[: len(chosen)] == chosen and len(set(chosen)) == len(chosen), "indices come first, once"
                    )
                    need(all(index < visible for index in chosen), "an entry that the query does not see")
                rows = torch.cat((as_bytes(rows), as_bytes(rows_of(cmp_kv, cmp_block_table[sequence], chosen))))
                rows = rows.view(ori_kv.dtype)
            if len(rows):
                keys = read(rows)
                every = torch.ones(num_heads, len(keys), dtype=torch.bool)
                found, sums_of = attend(q[token], keys, keys, every, softmax_scale, sinks)
                out[token] = found.to(q.dtype)
                # where a sink has weight, the documents disagree about whether lse counts it
                lse[0, token] = torch.where(sinks == LEAST, sums_of.float(), torch.nan)
    return out, lse if return_softmax_lse else torch.zeros(())


def sparse_flash_mla_metadata(num_heads_q, num_heads_kv, head_dim, **rest):
    return shared_metadata(vendor_ops.SPARSE_FLASH_MLA, num_heads_q, num_heads_kv, head_dim, **rest)


def sparse_flash_mla(q, ori_kv, cmp_kv, **rest):
    same_dtype(q, ori_kv, cmp_kv)
    need(ori_kv.shape[-1] == q.shape[-1], "rows of q's numbers")
    return shared_attention(vendor_ops.SPARSE_FLASH_MLA, lambda rows: rows, q, ori_kv, cmp_kv, **rest)


def mixed_quant_sparse_flash_mla_metadata(num_heads_q, num_heads_kv, head_dim, quant_mode, rope_head_dim, **rest):
    vendor = vendor_ops.MIXED_QUANT_SPARSE_FLASH_MLA
    return shared_metadata(
        vendor, num_heads_q, num_heads_kv, head_dim, quant=(quant_mode, rope_head_dim), **rest
    )  # fmt: skip


def mixed_quant_sparse_flash_mla(
    q, ori_kv, cmp_kv, quant_mode, rope_head_dim, key_dtype=None, value_dtype=None, **rest
):
    vendor = vendor_ops.MIXED_QUANT_SPARSE_FLASH_MLA
    need(quant_mode in (1, 2) and rope_head_dim == 64, f"quant_mode {quant_mode}, rope_head_dim {rope_head_dim}")
    need(ori_kv.dtype is torch.float8_e4m3fn and ori_kv.shape[-1] == {1: 608, 2: 584}[quant_mode], "records of fp8")
    need(key_dtype is None and value_dtype is None, "only fp8_e4m3 is modelled")

    def read(rows: Tensor) -> Tensor:
        """Records [n, bytes]: which bytes are the rotary part, the codes and the scales."""
        raw = rows.contiguous().view(torch.uint8)
        if quant_mode == 1:
            rope, codes, scales = raw[:, :128], raw[:, 128:576], raw[:, 576:590]
            scales = scales.contiguous().view(torch.bfloat16).float()
        else:
            codes, rope, scales = raw[:, :448], raw[:, 448:576], raw[:, 576:583]
            scales = torch.exp2(scales.float() - 127)
        nope = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (7, 64)) * scales[..., None]
        return torch.cat((nope.flatten(1), rope.contiguous().view(torch.bfloat16).float()), 1)

    quant = (quant_mode, rope_head_dim)
    return shared_attention(vendor, read, q, ori_kv, cmp_kv, quant=quant, **rest)


# ----------------------------------------------------------------------------------------------------------- indexing


def lightning_indexer_metadata(
    num_heads_q, num_heads_k, head_dim, topk, cu_seqlens_q, seqused_k, cmp_residual_k, batch_size, layout_q, layout_k,
    mask_mode, cmp_ratio, **unused,
):  # fmt: skip
    vendor = vendor_ops.LIGHTNING_INDEXER_V2
    need(all(value is None for value in unused.values()), f"not for these layouts: {unused}")
    need(num_heads_k == 1 and batch_size == len(cu_seqlens_q) - 1, "one head of keys, and the batch")
    for name, value in (("num_heads", num_heads_q), ("dim", head_dim), ("k", topk), ("ratio", cmp_ratio)):
        within(vendor, name, value)
    return fingerprint(
        num_heads_q, head_dim, topk, cu_seqlens_q, seqused_k, cmp_residual_k, layout_q, layout_k, mask_mode, cmp_ratio
    )


def lightning_indexer(
    q, k, w, topk, cu_seqlens_q, seqused_k, cmp_residual_k, block_table, metadata, layout_q, layout_k, mask_mode,
    cmp_ratio, max_seqlen_q, return_value, **unused,
):  # fmt: skip
    vendor = vendor_ops.LIGHTNING_INDEXER_V2
    need(all(value is None for value in unused.values()), f"not supported: {unused}")
    need((layout_q, layout_k, max_seqlen_q, return_value) == ("TND", "PA_BBND", -1, 0), f"{layout_q!r}, {layout_k!r}")
    need(mask_mode == 3, f"mask_mode {mask_mode} is not modelled")
    need(0 not in q.shape, "q is empty")
    dense(q=q, w=w)
    same_dtype(q, k)
    need(w.dtype is torch.float32 and w.shape == q.shape[:2], "w is float32 [T, N]")
    for name, value in (("dtype", q.dtype), ("dim", q.shape[2]), ("num_heads", q.shape[1]), ("k", topk),
                        ("block_size", k.shape[1]), ("ratio", cmp_ratio)):  # fmt: skip
        within(vendor, name, value)
    sums = running_sum(cu_seqlens_q, q.shape[0])
    within(vendor, "batch", len(sums) - 1)
    paged("k", k, block_table, seqused_k, len(sums) - 1)
    int32(cmp_residual_k=cmp_residual_k)
    need(all(0 <= residual < cmp_ratio for residual in cmp_residual_k.tolist()), "a residual is less than the ratio")
    prepared(
        metadata, q.shape[1], q.shape[2], topk, cu_seqlens_q, seqused_k, cmp_residual_k, layout_q, layout_k, mask_mode,
        cmp_ratio,
    )  # fmt: skip
    found = torch.full((q.shape[0], 1, topk), UNDEFINED_POSITION, dtype=torch.int32)
    for sequence, (start, end) in enumerate(pairwise(sums)):
        entries = seqused_k[sequence].item()
        length = entries * cmp_ratio + cmp_residual_k[sequence].item()
        for token in range(start, end):
            visible = max(length - (end - token) + 1, 0) // cmp_ratio
            keys = rows_of(k, block_table[sequence], range(min(visible, entries)))
            scores = (q[token].double() @ keys.double().T).relu().T @ w[token].double()
            best = scores.sort(descending=True, stable=True).indices[:topk]
            found[token] = -1
            found[token, 0, : len(best)] = best.int()
    return found, torch.empty(0)


OPERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        sparse_flash_mla, sparse_flash_mla_metadata, mixed_quant_sparse_flash_mla,
        mixed_quant_sparse_flash_mla_metadata, lightning_indexer, lightning_indexer_metadata,
    )
}  # fmt: skip
