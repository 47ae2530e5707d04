"""What Ascend's operators do and refuse, as their documentation says: on host memory, in plain loops.

Our reading of the documentation, not Huawei's code. `tests/doubles/torch_npu.py` calls it below the published
signatures; the fake aclnn library calls it below the real torch_npu. Whatever a document leaves undefined is either
rejected, or answered with values that a test must notice: NaN, or positions that no sequence has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvbackend.backends.npu import vendor_ops
from kvbackend.backends.npu.limits import VendorOp

INVALID = 161002  # aclnn's "invalid parameter"
UNDEFINED_POSITION = 987654321


class RejectedError(RuntimeError):
    """The operator returns 161002."""


def need(condition: object, why: str) -> None:
    if not condition:
        raise RejectedError(f"{INVALID}: {why}")


def within(vendor: VendorOp, name: str, value: Any) -> None:
    rule = vendor.limit(name).rule
    need(rule.allows(value), f"{vendor.name}: {name} is {value}, documented is {rule}")


def dense(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        need(tensor is None or tensor.is_contiguous(), f"{name} is not contiguous")


def same_dtype(*tensors: Tensor | None) -> None:
    need(len({tensor.dtype for tensor in tensors if tensor is not None}) == 1, "dtypes differ")


def int32(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        need(tensor is not None and tensor.dtype is torch.int32, f"{name} is missing or not int32")


# ------------------------------------------------------------------------------------------------------------ caches


def scatter(rows: Tensor, cache: Tensor, slots: Tensor, cache_mode: str) -> None:
    """Rows [T, N, D] to slots of [blocks, block_size, N, D]; in PA_NZ of [blocks, N * D / last, block_size, last].

    In PA_NZ pages of the plain shape are taken too, silently in another order, as on the device.
    """
    dense(rows=rows, cache=cache, slots=slots)
    same_dtype(rows, cache)
    need(slots.dtype in (torch.int32, torch.int64) and slots.shape == rows.shape[:1], "slot_mapping")
    last = 32 // rows.element_size()
    fractal = cache_mode == "PA_NZ" and cache.shape[1::2] == (rows[:1].numel() // last, last)
    blocks, block_size = cache.shape[0], cache.shape[2 if fractal else 1]
    used = [slot for slot in slots.tolist() if slot >= 0]
    need(
        len(set(used)) == len(used) and all(slot < blocks * block_size for slot in used), "slots repeat or are outside"
    )
    need(cache_mode in ("Norm", "PA_NZ"), f"cache_mode {cache_mode!r}")
    need(fractal or cache.shape[2:] == rows.shape[1:], "the rows of cache and key differ")
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot < 0:
            continue
        page, offset = cache[slot // block_size], slot % block_size
        if cache_mode == "Norm":
            page[offset] = row
        else:
            need(row.numel() % last == 0, "PA_NZ wants rows of whole fractals")
            page.view(row.numel() // last, block_size, last)[:, offset] = row.reshape(-1, last)


def npu_scatter_pa_kv_cache(
    key, value, key_cache, value_cache, slot_mapping, compress_lens, compress_seq_offsets, seq_lens, cache_mode
):  # fmt: skip
    need(compress_lens is None and compress_seq_offsets is None and seq_lens is None, "compression is not modelled")
    within(vendor_ops.SCATTER_PA_KV_CACHE, "dtype", key.dtype)
    same_dtype(key, value)
    scatter(key, key_cache, slot_mapping, cache_mode)
    scatter(value, value_cache, slot_mapping, cache_mode)


def npu_scatter_pa_cache(key, slot_mapping, compress_lens, compress_seq_offsets, seq_lens, key_cache):
    need(compress_lens is None and compress_seq_offsets is None and seq_lens is None, "compression is not modelled")
    within(vendor_ops.SCATTER_PA_CACHE, "dtype", key.dtype)
    scatter(key, key_cache, slot_mapping, "Norm")
    return key_cache


def npu_gather_pa_kv_cache(
    key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset, is_seq_lens_cumsum
):  # fmt: skip
    dense(key_cache=key_cache, value_cache=value_cache, block_tables=block_tables, seq_lens=seq_lens, key=key)
    int32(block_tables=block_tables, seq_lens=seq_lens)
    same_dtype(key_cache, key)
    same_dtype(value_cache, value)
    need(seq_offset is None, "offsets are not modelled")
    block_size = key_cache.shape[1]
    need(value_cache.shape[:2] == key_cache.shape[:2], "the caches have other blocks")
    if is_seq_lens_cumsum:
        need(seq_lens.shape[0] == block_tables.shape[0] + 1 and seq_lens[0] == 0, "a running sum of batch + 1")
        seq_lens = seq_lens.diff()
    need(seq_lens.shape[0] == block_tables.shape[0], "a length for each row of the table")
    for cache, out in ((key_cache, key), (value_cache, value)):
        within(vendor_ops.GATHER_PA_KV_CACHE, "dtype", cache.dtype)
        within(vendor_ops.GATHER_PA_KV_CACHE, "token_bytes", out[:1].numel() * out.element_size())
        need(cache.shape[2:] == out.shape[1:], "rows of cache and output differ")
        row = 0
        for table, length in zip(block_tables.tolist(), seq_lens.tolist(), strict=True):
            for position in range(length):
                if row < out.shape[0] and position // block_size < len(table):
                    block = table[position // block_size]
                    if 0 <= block < cache.shape[0]:  # the adapter's clamped entries; others are undefined
                        out[row] = cache[block, position % block_size]
                row += 1


# --------------------------------------------------------------------------------------------------------- attention


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sink: Tensor | None = None):
    """One head: q [n, D], k [S, D], v [S, Dv], seen [n, S]; out [n, Dv] and natural lse [n], in float64."""
    logits = (q.double() @ k.double().T * scale).masked_fill(~seen, -math.inf)
    lse = logits.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double().expand_as(lse))
    return (logits - total[:, None]).exp() @ v.double(), lse


def pages_of(table: list[int], length: int, cache: Tensor) -> Tensor:
    """The rows of one sequence: [length, *row]."""
    block_size = cache.shape[1]
    need(len(table) * block_size >= length, "the block table is too short")
    blocks = table[: -(-length // block_size)]
    need(all(0 <= block < cache.shape[0] for block in blocks), "a block outside the cache")
    return torch.cat([cache[block] for block in blocks])[:length] if blocks else cache[:0].flatten(0, 1)


FUSED_USED = (
    "query", "key", "value", "query_rope", "key_rope", "atten_mask", "actual_seq_qlen", "actual_seq_kvlen",
    "block_table", "learnable_sink", "num_query_heads", "num_key_value_heads", "softmax_scale", "pre_tokens",
    "next_tokens", "input_layout", "sparse_mode", "block_size", "return_softmax_lse", "inner_precise",
)  # fmt: skip


def npu_fused_infer_attention_score_v2(
    query, key, value, query_rope, key_rope, atten_mask, actual_seq_qlen, actual_seq_kvlen, block_table, learnable_sink,
    num_query_heads, num_key_value_heads, softmax_scale, input_layout, sparse_mode, block_size, return_softmax_lse,
    pre_tokens=2**31 - 1, next_tokens=2**31 - 1, inner_precise=0, **unused,
):  # fmt: skip
    fused = vendor_ops.FUSED_INFER_ATTENTION
    need(all(value in (None, 0) for value in unused.values()), f"not modelled: {unused}")
    need(input_layout == "TND", f"layout {input_layout!r} is not modelled")
    need(pre_tokens == next_tokens == 2**31 - 1 and inner_precise == 0, "only default windows are modelled")
    need(isinstance(actual_seq_qlen, list) and isinstance(actual_seq_kvlen, list), "lengths are host lists")
    dense(query=query, key=key, value=value, block_table=block_table, query_rope=query_rope, key_rope=key_rope)
    int32(block_table=block_table)
    same_dtype(query, key, value, query_rope, key_rope)
    within(fused, "dtype", query.dtype)
    num_tokens, num_heads, dim = query.shape
    need(num_query_heads == num_heads, f"num_query_heads {num_query_heads} for a query of {num_heads}")
    kv_heads = num_key_value_heads or num_query_heads
    ends, lens = actual_seq_qlen, actual_seq_kvlen
    need(ends == sorted(ends) and ends[-1:] == [num_tokens], "queryT must equal the last of actual_seq_qlen")
    need(len(lens) >= len(ends) and block_table.shape[0] >= len(ends), "lengths and tables of every sequence")
    within(fused, "batch", len(ends))
    key, value = (side.permute(0, 3, 1, 2, 4).flatten(2) if side.dim() == 5 else side for side in (key, value))  # NZ
    need(key.dim() == 3 and key.shape[1] == block_size == value.shape[1], "block_size is not the cache's")
    need(sparse_mode in (0, 3), f"sparse_mode {sparse_mode} is not modelled")
    if sparse_mode == 3:
        need(atten_mask is not None and atten_mask.shape == (2048, 2048), "mode 3 wants the compressed mask")
        need(atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), "dtype of the mask")
        need(atten_mask[0, 1] and not atten_mask[1, 0] and not atten_mask[0, 0], "ones are what is not seen")
    else:
        need(atten_mask is None, "a mask without mode")
    if query_rope is not None:
        need(kv_heads == 1 and dim == value.shape[2], "MLA has one kv head, its latent is key and value")
        within(fused, "mla_rank", dim)
        within(fused, "mla_rope_dim", query_rope.shape[2])
        within(fused, "mla_heads", num_heads)
        within(fused, "mla_block_size", block_size)
        need(not return_softmax_lse and learnable_sink is None, "MLA mode has no lse and no sink")
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    else:
        within(fused, "head_dim", dim)
        within(fused, "num_heads", num_heads)
        need(num_heads % kv_heads == 0, "heads are no multiple")
        within(fused, "group", num_heads // kv_heads)
        within(fused, "row_width", kv_heads * dim)
        within(fused, "block_size_64_128" if dim in (64, 128) else "block_size", block_size)
        if learnable_sink is not None:
            within(fused, "sink_dtype", learnable_sink.dtype)
            need(learnable_sink.shape == (num_heads,), "one sink for each head")
    need(key.shape[2] == kv_heads * query.shape[2] and value.shape[2] % kv_heads == 0, "width of the pages")
    out = torch.full((num_tokens, num_heads, value.shape[2] // kv_heads), math.nan, dtype=query.dtype)
    lse = torch.full((num_tokens, num_heads, 1), math.nan)
    first = 0
    for end, length, table in zip(ends, lens, block_table.tolist(), strict=False):
        count = end - first
        need(length > 0 or count == 0, "a query without keys is not modelled")
        k = pages_of(table, length, key).unflatten(-1, (kv_heads, -1))
        v = pages_of(table, length, value).unflatten(-1, (kv_heads, -1))
        positions = length - count + torch.arange(count)
        seen = torch.arange(length)[None] <= positions[:, None] if sparse_mode == 3 else torch.ones(count, length) > 0
        for head in range(num_heads):
            of = head // (num_heads // kv_heads)
            sink = None if learnable_sink is None else learnable_sink[head]
            rows = query[first:end, head]
            out[first:end, head], lse[first:end, head, 0] = (
                part.to(target.dtype)
                for part, target in zip(
                    attend(rows, k[:, of], v[:, of], seen, softmax_scale, sink), (out, lse), strict=True
                )
            )
        first = end
    return out, lse if return_softmax_lse else torch.zeros(1)


def chosen(query, indices, block_table, block_size, ends, lens, layout_query, layout_kv, sparse_mode):
    """(row, its sequence, its positions) of each query that belongs to a sequence; checks that indices are packed."""
    need(layout_query == "TND" and layout_kv == "PA_BSND", f"layouts {layout_query!r}, {layout_kv!r} are not modelled")
    need(sparse_mode in (0, 3), f"sparse_mode {sparse_mode}")
    int32(block_table=block_table, ends=ends, lens=lens)
    dense(query=query, indices=indices, block_table=block_table, ends=ends, lens=lens)
    need(ends.tolist() == sorted(ends.tolist()) and ends.shape == lens.shape, "query lengths are a running sum")
    need(ends.shape[0] == block_table.shape[0] and (ends.numel() == 0 or ends[-1] <= query.shape[0]), "the batch")
    need(block_table.shape[1] * block_size >= max(lens.tolist(), default=0), "the block table is too short")
    found, first = [], 0
    for sequence, (end, length) in enumerate(zip(ends.tolist(), lens.tolist(), strict=True)):
        for row in range(first, end):
            last = length - (end - row) if sparse_mode == 3 else length - 1
            found.append((row, sequence, last))
        first = end
    return found


def sparse_attention(q, k, v, indices, scale, table, ends, lens, layout_query, layout_kv, sparse_mode):
    """Over rows k [blocks, bs, D] and v: out [T, N, Dv]; rows of no sequence or no position hold NaN."""
    int32(sparse_indices=indices)
    need(indices.dim() == 3 and indices.shape[1] == 1 and indices.shape[2] > 0, "indices are [T, 1, k]")
    need(indices.shape[0] == q.shape[0], "a row of indices for each query")
    out = torch.full((*q.shape[:2], v.shape[2]), math.nan, dtype=q.dtype)
    for row, sequence, last in chosen(q, indices, table, k.shape[1], ends, lens, layout_query, layout_kv, sparse_mode):
        positions = indices[row, 0].tolist()
        used = [position for position in positions if position >= 0]
        need(positions[: len(used)] == used, "valid positions must come first")
        need(all(position <= last for position in used), "a position that the query does not see")
        if used:
            block_size = k.shape[1]
            blocks = [table[sequence, position // block_size].item() for position in used]
            need(all(0 <= block < k.shape[0] for block in blocks), "a block outside the cache")
            slots = [block * block_size + position % block_size for block, position in zip(blocks, used, strict=True)]
            keys, values = k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]
            seen = torch.ones(q.shape[1], len(used)) > 0
            out[row] = attend(q[row], keys, values, seen, scale)[0].to(out.dtype)
    return out


def npu_sparse_flash_attention(
    query, key, value, sparse_indices, scale_value, block_table, actual_seq_lengths_query, actual_seq_lengths_kv,
    query_rope, key_rope, sparse_block_size, layout_query, layout_kv, sparse_mode, attention_mode,
    return_softmax_lse=False, sinks=None, **windows,
):  # fmt: skip
    sparse = vendor_ops.SPARSE_FLASH_ATTENTION
    need(attention_mode == 2, f"attention_mode {attention_mode}; only 2 is accepted")
    need(sparse_block_size == 1 and not return_softmax_lse and sinks is None, "not for a paged cache")
    need(all(value == 2**63 - 1 for value in windows.values()), "only default windows")
    dense(key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    need(query_rope is not None and key_rope is not None, "the rope parts are missing")
    same_dtype(query, key, value, query_rope, key_rope)
    within(sparse, "dtype", query.dtype)
    within(sparse, "rank", query.shape[2])
    within(sparse, "rope_dim", query_rope.shape[2])
    within(sparse, "num_heads", query.shape[1])
    within(sparse, "block_size", key.shape[1])
    need(key.shape[2:] == (1, query.shape[2]), "one kv head of the query's dims")
    need(torch.equal(key[:1].nan_to_num(), value[:1].nan_to_num()), "key and value are the same latent")
    q, k = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)[:, :, 0]
    out = sparse_attention(q, k, value[:, :, 0], sparse_indices, scale_value, block_table, actual_seq_lengths_query,
                           actual_seq_lengths_kv, layout_query, layout_kv, sparse_mode)  # fmt: skip
    return out, torch.empty(0), torch.empty(0)


def npu_kv_quant_sparse_flash_attention(
    query, key, value, sparse_indices, scale_value, key_quant_mode, value_quant_mode, block_table,
    actual_seq_lengths_query, actual_seq_lengths_kv, sparse_block_size, layout_query, layout_kv, sparse_mode,
    attention_mode, quant_scale_repo_mode, tile_size, rope_head_dim, key_dequant_scale=None, value_dequant_scale=None,
    key_dtype=None, value_dtype=None, **windows,
):  # fmt: skip
    vendor = vendor_ops.KV_QUANT_SPARSE_FLASH_ATTENTION
    need((attention_mode, key_quant_mode, value_quant_mode, quant_scale_repo_mode) == (2, 2, 2, 1), "modes")
    need((tile_size, rope_head_dim, sparse_block_size) == (128, 64, 1), "tiles")
    need(key_dequant_scale is None and value_dequant_scale is None, "scales are in the rows")
    need(all(value == 2**63 - 1 for value in windows.values()), "only default windows")
    dense(key=key, value=value)
    need(key.dtype is torch.float8_e4m3fn and key.shape[2:] == (1, 656), "rows of 656 fp8 numbers")
    need(query.shape[2] == 576, "query is nope and rope together")
    within(vendor, "dtype", query.dtype)
    within(vendor, "num_heads", query.shape[1])
    within(vendor, "block_size", key.shape[1])
    codes, rope, scales = key[:, :, 0].view(torch.uint8).split((512, 128, 16), -1)
    latent = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    latent = (latent * scales.contiguous().view(torch.float32)[..., None]).flatten(-2)
    k = torch.cat((latent, rope.contiguous().view(torch.bfloat16).float()), -1)
    return sparse_attention(query, k, latent, sparse_indices, scale_value, block_table, actual_seq_lengths_query,
                            actual_seq_lengths_kv, layout_query, layout_kv, sparse_mode)  # fmt: skip


def npu_lightning_indexer(
    query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table, layout_query, layout_key,
    sparse_count, sparse_mode, return_value=False, **windows,
):  # fmt: skip
    indexer = vendor_ops.LIGHTNING_INDEXER
    need(not return_value and all(value == 2**63 - 1 for value in windows.values()), "not for a paged cache")
    dense(key=key, weights=weights)
    same_dtype(query, key)
    need(weights.dtype in (query.dtype, torch.float32) and weights.shape == query.shape[:2], "weights")
    for name, value in (("dtype", query.dtype), ("weights_dtype", weights.dtype), ("dim", query.shape[2]),
                        ("num_heads", query.shape[1]), ("block_size", key.shape[1]), ("k", sparse_count)):  # fmt: skip
        within(indexer, name, value)
    out = torch.full((query.shape[0], 1, sparse_count), UNDEFINED_POSITION, dtype=torch.int32)
    ends, lens = actual_seq_lengths_query, actual_seq_lengths_key
    for row, sequence, last in chosen(
        query, query, block_table, key.shape[1], ends, lens, layout_query, layout_key, sparse_mode
    ):
        keys = pages_of(block_table[sequence].tolist(), last + 1, key[:, :, 0]) if last >= 0 else key[:0, 0, 0]
        scores = (query[row].double() @ keys.double().T).relu().T @ weights[row].double()
        best = scores.sort(descending=True, stable=True).indices[:sparse_count]
        out[row] = -1
        out[row, 0, : len(best)] = best.int()
    return out, torch.empty(0, dtype=query.dtype)


def npu_attention_update(lse, local_out, update_type):
    vendor = vendor_ops.ATTENTION_UPDATE
    need(update_type in (0, 1), f"update_type {update_type}")
    need(len(lse) == len(local_out), "an lse for each part")
    within(vendor, "parts", len(lse))
    for part_lse, part in zip(lse, local_out, strict=True):
        dense(lse=part_lse, out=part)
        need(part_lse.dtype is torch.float32 and part_lse.shape == part.shape[:1], "lse is float32 [rows]")
        within(vendor, "dtype", part.dtype)
        within(vendor, "value_dim", part.shape[1])
    together = torch.stack(lse)
    largest = together.amax(0)
    weights = (together - largest).exp()
    total = weights.sum(0)
    out = (torch.stack(local_out).float() * (weights / total)[..., None]).sum(0).to(local_out[0].dtype)
    return out, largest + total.log() if update_type == 1 else None


# -------------------------------------------------------------------------------------------- products, norm, rotary


def npu_transpose_batchmatmul(input, weight, bias, scale, perm_x1, perm_x2, perm_y, batch_split_factor):
    vendor = vendor_ops.TRANSPOSE_BATCHMATMUL
    need(bias is None and scale is None and batch_split_factor in (None, 1), "not modelled")
    need(perm_x1 in ([0, 1, 2], [1, 0, 2]) and perm_x2 in (None, [0, 1, 2]) and perm_y == [1, 0, 2], "permutations")
    dense(input=input, weight=weight)
    same_dtype(input, weight)
    rows = input.permute(perm_x1)  # [B, M, K]
    heads, inputs, outputs = weight.shape
    need(rows.shape[0] == heads and rows.shape[2] == inputs, "shapes of input and weight")
    for name, value in (("dtype", input.dtype), ("num_heads", heads), ("inputs", inputs), ("outputs", outputs),
                        ("heads_by_inputs", heads * inputs)):  # fmt: skip
        within(vendor, name, value)
    return (rows.double() @ weight.double()).to(input.dtype).transpose(0, 1).contiguous()


def npu_rms_norm(input, gamma, epsilon):
    within(vendor_ops.RMS_NORM, "dtype", input.dtype)
    same_dtype(input, gamma)
    need(gamma.shape == input.shape[-1:], "gamma has the last dim of input")
    dense(input=input, gamma=gamma)
    x = input.float()
    rstd = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def npu_rotary_mul(input, r1, r2, rotary_mode, rotate=None):
    need(rotate is None and input.dim() == 4, "four dims, BSND")
    same_dtype(input, r1, r2)
    dense(input=input)
    within(vendor_ops.ROTARY_MUL, "rotary_dim", input.shape[3])
    batch, tokens, _, dim = input.shape
    need(r1.shape == r2.shape == (batch, tokens, 1, dim), "cos and sin are [B, S, 1, D]")
    need(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    if rotary_mode == "half":
        first, second = input.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-input[..., 1::2], input[..., 0::2]), -1).flatten(-2)
    return input * r1 + turned * r2


OPERATORS: dict[str, Callable[..., Any]] = {name: value for name, value in globals().items() if name.startswith("npu_")}
