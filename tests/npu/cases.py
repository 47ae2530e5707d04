"""Calls within Ascend's limits, whose sizes a test may change one by one: what the ops' own small samples are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvbackend import formats
from kvbackend.ops import _pages, registry
from kvbackend.ops._samples import IndexPool, Maker, MlaPool, Pool
from kvbackend.rope import cos_sin_table
from tests import edges

Call = dict[str, Any]
HOST = torch.device("cpu")


def pool_of(dtype: torch.dtype, device: torch.device, block_size: int, num_blocks: int, **sizes: Any) -> Pool:
    return Pool(device, dtype, num_blocks=num_blocks, block_size=block_size, **sizes)


def reshape_and_cache(dtype=torch.bfloat16, device=HOST, **_) -> Call:
    pool = Pool(device, dtype)
    key, value = pool.rows(5)
    key_cache, value_cache = pool.caches()
    return dict(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=pool.slots(5))


def concat_and_cache_mla(dtype=torch.bfloat16, device=HOST, **_) -> Call:
    pool = MlaPool(device, dtype)
    ckv, kpe = pool.rows(5)
    ckv_cache, kpe_cache = pool.caches()
    return dict(ckv=ckv, kpe=kpe, ckv_cache=ckv_cache, kpe_cache=kpe_cache, slot_mapping=pool.slots(5))


def store_rows(dtype=torch.bfloat16, device=HOST, **_) -> Call:
    pool = MlaPool(device, dtype)
    return dict(rows=pool.rows(5)[0], cache=pool.caches()[0], slot_mapping=pool.slots(5))


def gather_cache(dtype=torch.bfloat16, device=HOST, token_bytes=64, **_) -> Call:
    pool = pool_of(dtype, device, 4, 7, kv_heads=1, head_dim=-(-token_bytes // dtype.itemsize))
    cache = pool.caches()[0]
    tables = pool.block_tables([6, 3])
    if device.type != "meta":
        pool.fill(cache, tables, [6, 3])
    padded = [table + [0] * (2 - len(table)) for table in tables]
    return dict(cache=cache, block_table=pool.ints(padded), cu_seqlens=pool.ints([0, 6, 9]), num_tokens=9)


def paged_attention(
    dtype=torch.bfloat16, device=HOST, q_lens=(2, 1), seq_lens=(140, 9), num_heads=4, kv_heads=2, head_dim=64,
    value_dim=None, block_size=128, num_blocks=12, batch=None, sink_dtype=None, **other,
) -> Call:  # fmt: skip
    if batch is not None:
        q_lens, seq_lens, num_blocks = [1] * batch, [1] * batch, batch
    pool = pool_of(dtype, device, block_size, num_blocks, kv_heads=kv_heads, head_dim=head_dim,
                   value_dim=value_dim or head_dim)  # fmt: skip
    key_cache, value_cache = pool.caches()
    described, tables = pool.batch(list(q_lens), list(seq_lens))
    if device.type != "meta":
        pool.fill(key_cache, tables, list(seq_lens))
        pool.fill(value_cache, tables, list(seq_lens))
    call = dict(q=pool.randn(sum(q_lens), num_heads, head_dim), key_cache=key_cache, value_cache=value_cache)
    if sink_dtype is not None:
        other = {"sinks": pool.randn(num_heads).to(sink_dtype), **other}
    return {**call, **described, "softmax_scale": head_dim**-0.5, **other}


def latent(
    dtype, device, q_lens, seq_lens, num_heads, rank, rope_dim, block_size, num_blocks, **other
) -> tuple[Any, Call]:
    pool = pool_of(dtype, device, block_size, num_blocks)
    described, tables = pool.batch(list(q_lens), list(seq_lens))
    caches = {}
    for name, width in (("ckv_cache", rank), ("kpe_cache", rope_dim)):
        caches[name] = torch.full((num_blocks, block_size, width), torch.nan, dtype=dtype, device=device)
        if device.type != "meta":
            pool.fill(caches[name], tables, list(seq_lens))
    tokens = sum(q_lens)
    queries = dict(q_nope=pool.randn(tokens, num_heads, rank), q_pe=pool.randn(tokens, num_heads, rope_dim))
    return pool, {**queries, **caches, **described, "softmax_scale": 0.07, **other}


def mla_attention(
    dtype=torch.bfloat16, device=HOST, q_lens=(2, 1), seq_lens=(19, 40), mla_heads=4, mla_rank=512, mla_rope_dim=64,
    mla_block_size=16, num_blocks=7, batch=None, **other,
) -> Call:  # fmt: skip
    if batch is not None:
        q_lens, seq_lens, num_blocks = [1] * batch, [1] * batch, batch
    return latent(
        dtype, device, q_lens, seq_lens, mla_heads, mla_rank, mla_rope_dim, mla_block_size, num_blocks, **other
    )[1]


def sparse_mla_attention(
    dtype=torch.bfloat16, device=HOST, q_lens=(3, 1), seq_lens=(19, 40), num_heads=4, rank=512, rope_dim=64,
    block_size=16, num_blocks=7, topk=6, kv_format="auto", **other,
) -> Call:  # fmt: skip
    pool, call = latent(dtype, device, q_lens, seq_lens, num_heads, rank, rope_dim, block_size, num_blocks)
    chosen = []  # in no order, with gaps, positions of the future and of nobody
    for q_len, length in zip(q_lens, seq_lens, strict=True):
        for _ in range(q_len):
            seen = [int(position) for position in pool.permutation(length)[: topk - 2]]
            chosen.append(([-1, *seen, length] + [-1] * topk)[:topk])
    call["topk_indices"] = pool.ints(chosen).reshape(sum(q_lens), topk)
    if kv_format != "auto":
        page_bytes = formats.record(kv_format).page_bytes(block_size)
        pages = torch.full((num_blocks, page_bytes), 255, dtype=torch.uint8, device=device)
        if device.type != "meta":
            rows = torch.cat((call["ckv_cache"], call["kpe_cache"]), -1).flatten(0, 1)
            slots = (~rows[:, 0].isnan()).nonzero()[:, 0]
            _pages.write(pages, kv_format, slots, rows[slots], block_size)
        call |= dict(ckv_cache=pages, kpe_cache=None, kv_format=kv_format, block_size=block_size)
    return {**call, **other}


def lightning_indexer(
    dtype=torch.bfloat16, device=HOST, num_heads=8, dim=128, block_size=16, k=5, weights_dtype=None, compress_ratio=1,
    batch=None, **other,
) -> Call:  # fmt: skip
    pool = IndexPool(device, dtype, num_blocks=8, block_size=block_size, heads=num_heads, dim=dim)
    q_lens, seq_lens = ([2, 1], [19, 9]) if batch is None else ([1] * batch, [1] * batch)
    if device.type == "meta":
        pool.num_blocks = max(8, len(seq_lens))
        described, _ = pool.batch(q_lens, seq_lens)
        keys = torch.empty(pool.num_blocks, block_size, dim, dtype=dtype, device=device)
        tokens = sum(q_lens)
        call = dict(q=pool.randn(tokens, num_heads, dim), weights=pool.randn(tokens, num_heads), key_cache=keys)
        call |= dict(described, compress_ratio=compress_ratio)
    else:
        call = pool.call(q_lens, seq_lens, compress_ratio)
    if weights_dtype is not None:
        call["weights"] = call["weights"].to(weights_dtype)
    return {**call, "k": k, **other}


def shared_kv_attention(
    dtype=torch.bfloat16, device=HOST, q_lens=(2, 1), seq_lens=(40, 150), num_heads=4, dim=512, window=128,
    compress_ratio=4, topk=6, block_size=16, written=True, ring=0, has_entries=True, record="auto", **other,
) -> Call:  # fmt: skip
    """Entries of `topk` 0 are all read; `written` says that the ring holds the call's own rows."""
    num_seqs, tokens, on_host = len(seq_lens), sum(q_lens), device.type != "meta"
    newest = max(q_lens, default=1) if written else 0
    blocks = -(-(ring or window - 1 + newest) // block_size)
    rings = pool_of(dtype, device, block_size, num_seqs * blocks + 1)
    order = rings.permutation(num_seqs * blocks).tolist()
    tables = [order[i * blocks : (i + 1) * blocks] for i in range(num_seqs)]
    counts = [length // compress_ratio for length in seq_lens]
    entries = pool_of(dtype, device, block_size, sum(-(-count // block_size) for count in counts) + 1)
    batch, lists = entries.batch(list(q_lens), counts)
    block_table = batch.pop("block_table")
    caches = [
        torch.full((pool.num_blocks, block_size, dim), torch.nan, dtype=dtype, device=device)
        for pool in (rings, entries)
    ]
    if on_host:
        for table, new, length in zip(tables, q_lens, seq_lens, strict=True):
            end = length if written else length - new
            for position in range(max(end - blocks * block_size, 0), end):
                place = position % (blocks * block_size)
                caches[0][table[place // block_size], place % block_size] = rings.randn(dim)
        entries.fill(caches[1], lists, counts)
    if record != "auto":
        caches = [_packed(cache, record) for cache in caches]
        other |= dict(window_format=record, kv_format=record)
    call = dict(
        q=rings.randn(tokens, num_heads, dim), window_cache=caches[0],
        window_table=rings.ints(tables).reshape(num_seqs, blocks), **batch | dict(seq_lens=rings.ints(list(seq_lens))),
        softmax_scale=dim**-0.5, window=window, kv=None if written else rings.randn(tokens, dim),
        sinks=torch.linspace(-1, 2, num_heads).to(device),
    )  # fmt: skip
    if has_entries:
        call |= dict(compressed_cache=caches[1], block_table=block_table, compress_ratio=compress_ratio)
    if has_entries and topk:  # in no order, with gaps, entries of the future and of nobody
        chosen = []
        for new, length in zip(q_lens, seq_lens, strict=True):
            for position in range(length - new, length):
                seen = entries.permutation(max(position + 1, 0) // compress_ratio).tolist()[: topk - 2]
                chosen.append(([-1, *seen, position // compress_ratio + 1] + [-1] * topk)[:topk])
        call["topk_indices"] = entries.ints(chosen).reshape(tokens, topk)
    return {**call, **other}


def _packed(rows: torch.Tensor, record: str) -> torch.Tensor:
    """Pages of records of rows [nb, bs, D]; where a row is NaN, all bytes of its record are 255."""
    num_blocks, block_size, _ = rows.shape
    page_bytes = formats.record(record).page_bytes(block_size)
    pages = torch.full((num_blocks, page_bytes), 255, dtype=torch.uint8, device=rows.device)
    if rows.device.type != "meta":
        slots = (~rows.flatten(0, 1)[:, 0].isnan()).nonzero()[:, 0]
        _pages.write(pages, record, slots, rows.flatten(0, 1)[slots])
    return pages


def absorb_q(dtype=torch.bfloat16, device=HOST, num_heads=3, inputs=32, outputs=48, heads_by_inputs=None, **_) -> Call:
    if heads_by_inputs is not None:
        num_heads, inputs = -(-heads_by_inputs // 16), 16
    make = Maker(device, dtype)
    if device.type == "meta":
        return dict(
            q_nope=torch.empty(2, num_heads, inputs, dtype=dtype, device=device),
            w_uk=torch.empty(num_heads, inputs, outputs, dtype=dtype, device=device),
        )
    return dict(q_nope=make.randn(2, num_heads, inputs), w_uk=make.randn(num_heads, inputs, outputs, scale=0.2))


def merge_attn_states(dtype=torch.bfloat16, device=HOST, parts=2, value_dim=16, **other) -> Call:
    make = Maker(device, dtype)
    return dict(outs=make.randn(parts, 3, 2, value_dim), lses=make.randn(parts, 3, 2).float(), sinks=None) | other


def apply_rope(dtype=torch.bfloat16, device=HOST, rotary_dim=16, **other) -> Call:
    make = Maker(device, dtype)
    table = cos_sin_table(9, rotary_dim, 1e4, device=device)
    return dict(x=make.randn(3, 2, rotary_dim), positions=make.ints([4, -1, 7]), cos_sin=table, **other)


def mla_project_kv(dtype=torch.bfloat16, device=HOST, rotary_dim=8, **_) -> Call:
    make = Maker(device, dtype)
    return dict(
        hidden=make.randn(3, 20), w_kva=make.randn(24 + rotary_dim, 20, scale=0.2), norm_weight=make.randn(24),
        cos_sin=cos_sin_table(9, rotary_dim, 1e4, device=device), positions=make.ints([4, -1, 7]), eps=1e-6,
    )  # fmt: skip


def of(op: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Named calls of an op that the adapter should take: variants that exercise views, padding and empty rows."""
    make = globals().get(op)
    if make is None:
        return
    yield "plain", make(dtype)
    mixed = dict(q_lens=(1, 5, 0, 2), seq_lens=(8, 21, 3, 2))
    if op in ("paged_attention", "mla_attention", "sparse_mla_attention"):
        yield "mixed", make(dtype, **mixed)
        yield "decode", make(dtype, q_lens=(1, 1, 1), seq_lens=(5, 1, 19))
        yield "many sequences", make(dtype, q_lens=(1,) * 6, seq_lens=(16,) * 6)
        yield "empty sequence", make(dtype, q_lens=(0, 1, 0), seq_lens=(0, 4, 0))
        yield "query of no cached token", make(dtype, q_lens=(1, 1), seq_lens=(0, 3))
        yield "no tokens", make(dtype, q_lens=(0, 0), seq_lens=(3, 0))
        yield "empty batch", make(dtype, q_lens=(), seq_lens=())
        yield "not causal", make(dtype, **mixed, causal=False)
        call = make(dtype, **mixed)
        yield "int64 table, freed first block", call | dict(block_table=_without_first(call["block_table"]).long())
        yield "strided table", call | dict(block_table=torch.stack((call["block_table"],) * 2, -1)[..., 0])
        names = [name for name in ("q", "q_nope", "q_pe", "topk_indices") if name in call]
        yield "rows past the batch", call | {name: torch.cat((call[name], call[name][:2])) for name in names}
        wide = {name: torch.cat((call[name],) * 2, -1)[..., : call[name].shape[-1]] for name in names}
        yield "strided queries", call | wide
    if op == "paged_attention":
        yield "lse", make(dtype, **mixed, return_lse=True)
        yield "lse, rows past the batch", call | dict(q=torch.cat((call["q"], call["q"][:2])), return_lse=True)
        yield "MQA", make(dtype, kv_heads=1)
        yield "MHA", make(dtype, kv_heads=4)
        yield "dims 192 and 128", make(dtype, head_dim=192, value_dim=128)
        yield "sinks", make(dtype, sink_dtype=torch.bfloat16)
    if op == "sparse_mla_attention":
        yield "k of 1", call | dict(topk_indices=call["topk_indices"][:, 1:2])
        yield "records", make(dtype, kv_format="v32_fp8_656_ascend")
        yield "records, not causal", make(dtype, **mixed, kv_format="v32_fp8_656_ascend", causal=False)
    if op == "lightning_indexer":
        call = make(dtype)
        yield "more than there are", call | dict(k=40)
        yield "equal scores", call | dict(q=torch.zeros_like(call["q"]))
        yield "rows past the batch", call | {name: torch.cat((call[name],) * 2) for name in ("q", "weights")}
        for ratio in (2, 4, 128):
            call = pool_call = make(dtype, num_heads=64, compress_ratio=ratio)
            yield f"ratio {ratio}", call
        yield "ratio 4, 7 heads, k of 4096", make(dtype, num_heads=7, compress_ratio=4, k=4096)
        yield (
            "ratio 4, rows past the batch",
            pool_call | {name: torch.cat((pool_call[name],) * 2) for name in ("q", "weights")},
        )
    if op == "shared_kv_attention":
        yield from _of_shared_kv(dtype)
    if op == "absorb_q":
        yield (
            "expanded queries",
            call | dict(q_nope=call["q_nope"][:1].expand(4, -1, -1)) if (call := make(dtype)) else call,
        )
    if op == "merge_attn_states":
        call = make(dtype, parts=3)
        lses = call["lses"].clone()
        lses[:, 0], lses[0, 1], lses[1, 2, 0] = -torch.inf, torch.inf, -torch.inf
        outs = call["outs"].masked_fill(lses.isinf()[..., None], torch.nan)
        yield "empty parts", dict(outs=outs, lses=lses, sinks=None)
        yield "empty parts and sinks", dict(outs=outs, lses=lses, sinks=torch.tensor([0.5, -torch.inf]))
        yield "strided", call | dict(outs=call["outs"].transpose(1, 2).contiguous().transpose(1, 2))


def _of_shared_kv(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    make = shared_kv_attention
    mixed = dict(q_lens=(1, 5, 0, 2), seq_lens=(8, 321, 3, 132))
    call = make(dtype, **mixed)
    yield "mixed", call
    yield "rows of the call apart", make(dtype, **mixed, written=False)
    yield "decode", make(dtype, q_lens=(1, 1, 1), seq_lens=(5, 1, 290))
    yield "decode, rows of the call apart", make(dtype, q_lens=(1, 1, 1), seq_lens=(5, 1, 290), written=False)
    yield "window alone", make(dtype, **mixed, has_entries=False)
    yield "window alone, rows of the call apart", make(dtype, **mixed, has_entries=False, written=False)
    yield "a long ring", make(dtype, **mixed, ring=400)
    yield "all entries", make(dtype, **mixed, compress_ratio=128, topk=0)
    yield "all entries, rows of the call apart", make(dtype, **mixed, compress_ratio=128, topk=0, written=False)
    yield "k of 700", make(dtype, topk=700)
    yield "k of 0", call | dict(topk_indices=call["topk_indices"][:, :0])
    yield "no sinks", call | dict(sinks=None)
    yield "lse", make(dtype, **mixed, return_lse=True)
    yield "lse, no sinks", make(dtype, **mixed, return_lse=True, sinks=None)
    yield "rotated back", make(dtype, **mixed, cos_sin=cos_sin_table(400, 64, 1e4))
    yield "empty sequence", make(dtype, q_lens=(0, 1, 0), seq_lens=(0, 4, 0))
    yield "query of no cached token", make(dtype, q_lens=(1, 1), seq_lens=(0, 30))
    yield "no tokens", make(dtype, q_lens=(0, 0), seq_lens=(3, 0))
    yield "empty batch", make(dtype, q_lens=(), seq_lens=())
    lost = call["block_table"].long()
    lost[1, 0] = -1
    yield "int64 tables, freed first block", call | dict(block_table=lost, window_table=call["window_table"].long())
    gone = call["window_table"].clone()
    gone[1, 1] = -1
    yield "freed window block", call | dict(window_table=gone)
    every = make(dtype, **mixed, compress_ratio=128, topk=0)
    lost = every["block_table"].clone()
    lost[1, 0] = -1
    yield "all entries, freed first block", every | dict(block_table=lost)
    names = ("q", "topk_indices")
    yield "rows past the batch", call | {name: torch.cat((call[name], call[name][:2])) for name in names}
    yield "strided queries", call | dict(q=torch.cat((call["q"],) * 2, -1)[..., :512])
    yield "window of 5, ratio 2", make(dtype, **mixed, window=5, compress_ratio=2)
    yield "window of 1, ratio 1", make(dtype, **mixed, window=1, compress_ratio=1, block_size=3)
    for name in ("v4_fp8_608_ascend", "v4_fp8_584_ascend"):
        yield name, make(dtype, **mixed, record=name)
        yield f"{name}, all entries", make(dtype, **mixed, record=name, compress_ratio=128, topk=0)
        yield f"{name}, window alone", make(dtype, **mixed, record=name, has_entries=False, kv_format="auto")


def _without_first(table: torch.Tensor) -> torch.Tensor:
    table = table.clone()
    table[1:2, :1] = -1
    return table


def every(op: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """The op's own samples, those of sizes where engines broke, then those above."""
    yield from registry[op].make_samples("cpu", dtype)
    yield from ((name, call) for name, made, call in edges.calls(op) if made == dtype)
    for name, call in of(op, dtype):
        yield f"npu: {name}", call
