"""Calls within the libraries' limits: what the ops' own small samples are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvbackend.ops import registry
from kvbackend.ops._samples import IndexPool, Pages
from kvbackend.rope import cos_sin_table
from tests.npu import cases

Call = dict[str, Any]
MIXED = dict(q_lens=(1, 4, 0, 2), seq_lens=(80, 21, 3, 2))
HOST = torch.device("cpu")


def fused(call: Call) -> Call:
    """The call with latent and rotary caches as halves of one tensor."""
    whole = torch.cat((call["ckv_cache"], call["kpe_cache"]), -1)
    rank = call["ckv_cache"].shape[-1]
    return call | dict(ckv_cache=whole[..., :rank], kpe_cache=whole[..., rank:])


def mla_attention(dtype: torch.dtype, **sizes: Any) -> Call:
    return fused(cases.mla_attention(dtype, **{"mla_block_size": 64, "num_blocks": 7, "mla_heads": 3, **sizes}))


def sparse_mla_attention(dtype: torch.dtype, kv_format: str = "auto", **sizes: Any) -> Call:
    call = cases.sparse_mla_attention(dtype, kv_format=kv_format, **{"num_blocks": 16, **sizes})
    return fused(call) if kv_format == "auto" else call


def shared_kv_attention(dtype: torch.dtype, **other: Any) -> Call:
    """DeepSeek-V4's rows, written before the call: windows of 5 in rings of 12, a compressed row for 2 tokens."""
    from kvbackend.ops import _pages

    record, window, ring = "v4_fp8_584", 5, 12
    q_lens, seq_lens = [1, 4, 8], [9, 7, 23]  # the last chunk and its window fill a ring
    pool = Pages(HOST, dtype, num_blocks=20, block_size=4)
    batch, tables = pool.batch(q_lens, [length // 2 for length in seq_lens])
    blocks = pool.permutation(9).tolist()
    window_table = pool.ints(blocks).reshape(3, 3)
    window_cache, compressed_cache = (
        torch.full((count, _page_bytes(record, 4)), 255, dtype=torch.uint8) for count in (10, 20)
    )
    for sequence, length in enumerate(seq_lens):
        places = [position % ring for position in range(max(length - ring, 0), length)]
        slots = [int(window_table[sequence, place // 4]) * 4 + place % 4 for place in places]
        _pages.write(window_cache, record, pool.ints(slots), pool.randn(len(slots), 512))
        slots = [tables[sequence][i // 4] * 4 + i % 4 for i in range(length // 2)]
        _pages.write(compressed_cache, record, pool.ints(slots), pool.randn(len(slots), 512))
    chosen = []
    for new, length in zip(q_lens, seq_lens, strict=True):
        for position in range(length - new, length):
            picks = pool.permutation((position + 1) // 2).tolist()[:3]
            chosen.append([-1] * (3 - len(picks)) + picks)
    return {
        "q": pool.randn(sum(q_lens), 5, 512), "window_cache": window_cache, "window_table": window_table,
        **batch, "seq_lens": pool.ints(seq_lens), "softmax_scale": 512**-0.5, "window": window,
        "compressed_cache": compressed_cache, "topk_indices": pool.ints(chosen), "compress_ratio": 2,
        "window_format": record, "kv_format": record, "sinks": torch.tensor([0.3, -0.5, 2.0, -torch.inf, 0.0]),
        "return_lse": True, **other,
    }  # fmt: skip


def _page_bytes(record: str, rows: int) -> int:
    from kvbackend import formats

    return formats.record(record).page_bytes(rows)


def indexer_logits(
    dtype: torch.dtype, q_lens: Any = (1, 4, 0, 2), seq_lens: Any = (80, 21, 3, 2), block_size: int = 64,
    heads: int = 32, kv_format: str = "index_fp8_132", compress_ratio: int = 1,
) -> Call:  # fmt: skip
    pool = IndexPool(HOST, dtype, num_blocks=12, block_size=block_size, heads=heads, dim=128, kv_format=kv_format)
    call = pool.call(list(q_lens), list(seq_lens), compress_ratio)
    return call | dict(q=call["q"].to(torch.float8_e4m3fn), weights=call["weights"].float())


def paged_attention(dtype: torch.dtype, **sizes: Any) -> Call:
    return cases.paged_attention(dtype, **{"num_heads": 4, "kv_heads": 2, "head_dim": 128, "block_size": 16,
                                           "num_blocks": 24, **sizes})  # fmt: skip


def merge_attn_states(dtype: torch.dtype, **other: Any) -> Call:
    return cases.merge_attn_states(dtype, value_dim=64, **other)


BATCHES: dict[str, Call] = {  # that every attention must take
    "decode": dict(q_lens=(1, 1, 1), seq_lens=(70, 1, 19)),
    "mixed": MIXED,
    "not causal": dict(**MIXED, causal=False),
    "not causal, a query before the first token": dict(q_lens=(3, 1), seq_lens=(2, 5), causal=False),
    "empty sequence": dict(q_lens=(0, 1, 0), seq_lens=(0, 4, 0)),
    "query of no cached token": dict(q_lens=(1, 1), seq_lens=(0, 3)),
    "no tokens": dict(q_lens=(0, 0), seq_lens=(3, 0)),
    "empty batch": dict(q_lens=(), seq_lens=()),
}
PROMPTS: dict[str, Call] = {
    "prompt": dict(q_lens=(40, 0, 9, 1), seq_lens=(40, 3, 30, 17)),
    "prompt, not causal": dict(q_lens=(40, 0, 9, 1), seq_lens=(40, 3, 30, 17), causal=False),
    "prompt and a query of no cached token": dict(q_lens=(30, 1), seq_lens=(33, 0)),
    "more queries than tokens": dict(q_lens=(30,), seq_lens=(20,)),
    "more queries than tokens, not causal": dict(q_lens=(30,), seq_lens=(20,), causal=False),
}


def variants(call: Call) -> Iterator[tuple[str, Call]]:
    """The same attention with other tables, rows and strides."""
    table = call["block_table"].clone()
    table[:2, 0] = -1
    yield "int64 table, freed first blocks", call | dict(block_table=table.long())
    yield "strided table", call | dict(block_table=torch.stack((call["block_table"],) * 2, -1)[..., 0])
    names = [name for name in ("q", "q_nope", "q_pe", "topk_indices") if name in call]
    yield "rows past the batch", call | {name: torch.cat((call[name], call[name][:2])) for name in names}
    wide = {name: torch.cat((call[name],) * 2, -1)[..., : call[name].shape[-1]] for name in names}
    yield "strided queries", call | wide


def flash_mla_mla_attention(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for name, batch in BATCHES.items():
        yield name, mla_attention(dtype, **batch, return_lse=True)
    yield from variants(mla_attention(dtype, **MIXED, return_lse=True))
    holes = mla_attention(dtype, q_lens=(1, 3), seq_lens=(200, 140), return_lse=True)
    table = holes["block_table"].clone()
    table[0, 1], table[1, 0] = -1, -1
    yield "freed middle block", holes | dict(block_table=table)
    yield "many heads, no lse", mla_attention(dtype, mla_heads=128, q_lens=(1,), seq_lens=(65,))


def flash_mla_sparse_mla_attention(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for name, batch in BATCHES.items():
        yield name, sparse_mla_attention(dtype, **batch, return_lse=True)
    call = sparse_mla_attention(dtype, **MIXED, return_lse=True)
    yield from variants(call)
    yield "k of 1, no lse", call | dict(topk_indices=call["topk_indices"][:, 1:2], return_lse=False)
    yield "more heads than 64", sparse_mla_attention(dtype, num_heads=70)
    records: Call = dict(kv_format="v32_fp8_656", return_lse=True)
    for name in ("mixed", "not causal", "query of no cached token", "empty batch"):
        yield f"records, {name}", sparse_mla_attention(dtype, **BATCHES[name], **records)
    odd = dict(block_size=53, q_lens=(1, 2), seq_lens=(150, 9), topk=130)
    yield "records, odd pages, 130 tokens chosen", sparse_mla_attention(dtype, **odd, **records)


def flash_mla_shared_kv_attention(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    call = shared_kv_attention(dtype)
    yield "plain", call
    yield "rotated back", shared_kv_attention(dtype, cos_sin=cos_sin_table(64, 64, 1e4))
    yield "all entries", call | dict(topk_indices=None)
    yield "window only", call | dict(topk_indices=None, compressed_cache=None, block_table=None, kv_format="auto")
    no_window = dict(window_cache=call["window_cache"][:0], window_table=torch.full_like(call["window_table"], -1))
    yield "no block of the window, entries", call | no_window
    yield (
        "no block of either",
        call
        | no_window
        | dict(compressed_cache=call["compressed_cache"][:0], block_table=torch.full_like(call["block_table"], -1)),
    )
    yield "no entry chosen", call | dict(topk_indices=call["topk_indices"][:, :0])
    yield "no sinks, no lse", shared_kv_attention(dtype, sinks=None, return_lse=False)
    table, window_table = call["block_table"].long(), call["window_table"].clone()
    table[:, 0], window_table[:, 1] = -1, -1
    yield "freed blocks", call | dict(block_table=table, window_table=window_table)
    names = ("q", "topk_indices")
    yield "rows past the batch", call | {name: torch.cat((call[name], call[name][:2])) for name in names}
    yield "window of 1", shared_kv_attention(dtype, window=1)


def deep_gemm_indexer_logits(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for kind, q_lens, seq_lens in (("decode", (1, 4, 0, 2), (80, 21, 3, 2)), ("prompt", (40, 9), (130, 9))):
        call = indexer_logits(dtype, q_lens, seq_lens)
        yield kind, call
        yield f"{kind}, padded pages", indexer_logits(dtype, q_lens, seq_lens, kv_format="v41_index_fp8_132")
        yield f"{kind}, a key for 4 tokens", indexer_logits(dtype, q_lens, seq_lens, compress_ratio=4)
        table = call["block_table"].long()
        table[:2, 0] = -1
        yield f"{kind}, freed first blocks, int64 table", call | dict(block_table=table)
        more = {name: torch.cat((call[name].float(), call[name][:2].float())) for name in ("q", "weights")}
        yield f"{kind}, rows past the batch", call | more | dict(q=more["q"].to(torch.float8_e4m3fn))
        wide = torch.stack((call["q"].float(),) * 2, -1).to(torch.float8_e4m3fn)[..., 0]
        yield f"{kind}, strided queries", call | dict(q=wide)
    yield "query of no cached key", indexer_logits(dtype, (1, 1), (0, 3))
    yield "no tokens", indexer_logits(dtype, (0, 0), (3, 0))
    yield "empty batch", indexer_logits(dtype, (), ())


def flashinfer_paged_attention(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for name, batch in BATCHES.items():
        yield name, paged_attention(dtype, **batch)
    yield from variants(paged_attention(dtype, **MIXED))
    holes = paged_attention(dtype, q_lens=(1, 3), seq_lens=(70, 40))
    table = holes["block_table"].clone()
    table[0, 1], table[1, 0] = -1, -1
    yield "freed middle block", holes | dict(block_table=table)
    yield "sinks", paged_attention(dtype, **MIXED, sink_dtype=dtype)
    yield "decode, lse", paged_attention(dtype, **MIXED, return_lse=True)
    for name, batch in PROMPTS.items():
        yield name, paged_attention(dtype, **batch, return_lse=True)
    prompt = PROMPTS["prompt"]
    call = paged_attention(dtype, **prompt, return_lse=True)
    for name, other in variants(call):
        yield f"prompt, {name}", other
    table = call["block_table"].clone()
    table[0, :2] = -1
    yield "prompt, freed first blocks, window", call | dict(block_table=table, window=5)
    table = call["block_table"].clone()
    table[0, 1] = -1
    yield "prompt, freed middle block", call | dict(block_table=table, window=5)
    yield "prompt, window", paged_attention(dtype, **prompt, window=5, return_lse=True)
    yield "prompt, not causal, window", paged_attention(dtype, **PROMPTS["prompt, not causal"], window=5)
    yield "prompt, softcap", paged_attention(dtype, **prompt, softcap=2.0, softmax_scale=1.5, return_lse=True)
    yield "prompt, dims 192 and 128", paged_attention(dtype, **prompt, head_dim=192, value_dim=128)


def flashinfer_mla_attention(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for name, batch in BATCHES.items():
        yield name, mla_attention(dtype, **batch)
    yield from variants(mla_attention(dtype, **MIXED))
    for name, batch in PROMPTS.items():
        yield name, cases.mla_attention(dtype, num_blocks=12, **batch, return_lse=True)
    call = mla_attention(dtype, **PROMPTS["prompt"], mla_block_size=16, num_blocks=12, return_lse=True)
    for name, other in variants(call):
        yield f"prompt, {name}", other
    table = call["block_table"].clone()
    table[0, 1] = -1
    yield "prompt, freed middle block", call | dict(block_table=table)


def flashinfer_merge_attn_states(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    call = merge_attn_states(dtype, parts=3)
    yield "three parts", call
    lses = call["lses"].clone()
    lses[:, 0], lses[0, 1], lses[1, 2, 0], lses[2, 2, 1] = -torch.inf, torch.inf, -torch.inf, torch.nan
    outs = call["outs"].masked_fill(lses.isinf()[..., None], torch.nan)
    yield "empty parts and NaN", dict(outs=outs, lses=lses, sinks=None)
    yield "empty parts and sinks", dict(outs=outs, lses=lses, sinks=torch.tensor([0.5, -torch.inf]))
    yield "strided", call | dict(outs=call["outs"].transpose(1, 2).contiguous().transpose(1, 2))


def of(provider: str, op: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Named calls that a provider must take on some GPU."""
    yield from globals()[f"{provider}_{op}"](dtype)


def every(provider: str, op: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """The op's own samples, then those above."""
    yield from registry[op].make_samples("cpu", dtype)
    for name, call in of(provider, op, dtype):
        yield f"{provider}: {name}", call
