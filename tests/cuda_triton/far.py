"""Blocks whose offsets pass 2^31 elements: a pool whose memory is only addressed, not there, but for two blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbackend import backends, formats
from kvbackend.matrix import TOLERANCES, difference
from kvbackend.ops import registry

STRIDE, LAST = 276480, 7768  # 7768 * 276480 is the first multiple past 2^31
BLOCK = 16


def pool(*row: int) -> Tensor:
    """[LAST + 1, BLOCK, *row] bfloat16 with blocks STRIDE elements apart, of which the last two hold numbers."""
    memory = torch.empty((LAST + 1) * STRIDE, dtype=torch.bfloat16)  # never touched, so never resident
    strides = [1]
    for size in reversed(row):
        strides.insert(0, strides[0] * size)
    cache = memory.as_strided((LAST + 1, BLOCK, *row), (STRIDE, *strides))
    cache[-2:] = torch.randn(2, BLOCK, *row, generator=torch.Generator().manual_seed(5))
    return cache


def batch() -> dict[str, Any]:
    return dict(
        block_table=torch.tensor([[LAST - 1, LAST]]).int(), seq_lens=torch.tensor([29]).int(),
        cu_seqlens_q=torch.tensor([0, 6]).int(), max_seqlen_q=6, softmax_scale=0.2,
    )  # fmt: skip


def far_records(record: str, count: int, offset: int = 0) -> Tensor:
    """[2, bytes of `count` rows] uint8, more than 2^31 bytes apart; no wider word fits an odd offset."""
    memory = torch.empty((1 << 31) + 65536, dtype=torch.uint8)
    return memory.as_strided((2, formats.record(record).page_bytes(count)), ((1 << 31) + 16, 1), offset)


def run(name: str, **args: Any) -> Any:
    adapter = backends.registered()["cuda_triton"].adapter(name)
    assert adapter is not None
    return adapter.run(**registry[name].bind((), args))


def apart(name: str, **args: Any) -> str | None:
    """Launcher and reference over the same far pages."""
    got, want = run(name, **args), registry[name].reference(**registry[name].bind((), args))
    got, want = (got[0], want[0]) if isinstance(got, tuple) else (got, want)
    found = difference(got, want)
    allowed = TOLERANCES.get(got.dtype, 0.0) if got.dtype.is_floating_point else 0.0
    return None if found <= allowed else f"differs by {found:.3g}"


def same(got: Tensor, want: Tensor) -> str | None:
    return None if torch.equal(got, want) else "wrote elsewhere"


def verdicts() -> dict[str, str | None]:
    found = {}
    keys, latents = pool(2, 16), pool(40)
    q = torch.randn(6, 4, 16).bfloat16()
    found["paged_attention"] = apart("paged_attention", q=q, key_cache=keys, value_cache=keys, **batch())
    choices = dict(topk_indices=torch.randint(0, 29, (6, 2, 9)), page_size=4, num_sinks=2, num_recent=3)
    found["sparse_attention"] = apart(
        "sparse_attention", q=q, key_cache=keys, value_cache=keys, **batch(), **choices
    )  # fmt: skip
    unscaled = {name: value for name, value in batch().items() if name != "softmax_scale"}
    pages = torch.arange(7).expand(6, 2, 7)
    found["token_logits"] = apart("token_logits", q=q, key_cache=keys, pages=pages, page_size=4, **unscaled)
    found["page_logits"] = apart("page_logits", q=q, low_cache=keys, high_cache=keys, page_size=1, **unscaled)
    parts = dict(ckv_cache=latents[..., :32], kpe_cache=latents[..., 32:])
    queries = dict(q_nope=torch.randn(6, 3, 32).bfloat16(), q_pe=torch.randn(6, 3, 8).bfloat16())
    found["mla_attention"] = apart("mla_attention", **queries, **parts, **batch())
    shared = dict(
        window_cache=latents, window_table=torch.tensor([[LAST, LAST - 1]]), window=9, compressed_cache=latents
    )
    q = torch.randn(6, 3, 40).bfloat16()
    found["shared_kv_attention"] = apart("shared_kv_attention", q=q, **shared, **batch())
    compressed = dict(
        kv=torch.randn(3, 4), gate=torch.randn(3, 4), norm_weight=torch.ones(4), seq_lens=torch.tensor([7]).int(),
        cu_seqlens_q=torch.tensor([0, 3]).int(), compress_ratio=4, eps=1e-6, state_slots=torch.tensor([1]),
    )  # fmt: skip
    near, far = torch.randn(2, 4, 8), torch.empty((1 << 31) + 64).as_strided((2, 4, 8), ((1 << 31) + 16, 8, 1))
    far.copy_(near)
    want, got = (run("compress_kv", state=state, **compressed)[0] for state in (near, far))
    found["compress_kv"] = same(got, want) or same(far, near)
    index = dict(q=q, weights=torch.randn(6, 3), key_cache=latents, **unscaled)
    found["indexer_logits"] = apart("indexer_logits", **index)
    found["lightning_indexer"] = apart("lightning_indexer", k=5, **index)
    scored = dict(q=torch.randn(6, 4, 16).bfloat16(), key_cache=keys, **batch())
    want, got = torch.zeros(1, 2, 29), torch.zeros(1, 2, 29)
    run("accumulate_scores", scores=got, **scored)
    registry["accumulate_scores"].reference(**registry["accumulate_scores"].bind((), dict(scores=want, **scored)))
    found["accumulate_scores"] = None if difference(got, want) <= TOLERANCES[torch.float32] else "scores differ"
    ragged = dict(block_table=batch()["block_table"], cu_seqlens=torch.tensor([0, 29]).int(), num_tokens=29)
    found["gather_cache"] = apart("gather_cache", cache=keys, **ragged)
    run("copy_blocks", cache=keys, block_mapping=torch.tensor([[LAST, LAST - 1]]))
    found["copy_blocks"] = same(keys[LAST - 1], keys[LAST])
    slots = torch.tensor([LAST * BLOCK + 3, LAST * BLOCK + 15])
    rows = torch.randn(2, 2, 16).bfloat16()
    run("reshape_and_cache", key=rows, value=rows + 1, key_cache=keys, value_cache=pool(2, 16), slot_mapping=slots)
    found["reshape_and_cache"] = same(keys[LAST, [3, 15]], rows)
    before = keys[LAST].clone()
    run("compact_cache", cache=keys, block_table=torch.tensor([[LAST, LAST - 1]]), kept=torch.tensor([[[3, 15]]]))
    found["compact_cache"] = same(keys[LAST, :2], before[[3, 15]])
    projected = dict(
        hidden=torch.randn(2, 8).bfloat16(), w_kva=torch.randn(40, 8).bfloat16(), norm_weight=torch.ones(32).bfloat16(),
        cos_sin=torch.randn(4, 8), positions=torch.tensor([1, 2]), eps=1e-6, slot_mapping=slots,
    )  # fmt: skip
    row = torch.cat(run("mla_project_kv", **projected, **parts), -1)
    found["mla_project_kv"] = same(latents[LAST, [3, 15]], row)
    row = torch.randn(2, 40).bfloat16()
    run("concat_and_cache_mla", ckv=row[:, :32], kpe=row[:, 32:], slot_mapping=slots, **parts)
    found["concat_and_cache_mla"] = same(latents[LAST, [3, 15]], row)
    pages = far_records("v4_fp8_584", 4, 1)
    pages.random_(generator=torch.Generator().manual_seed(5))
    layouts = dict(from_layout="v4_fp8_584", to_layout="v4_fp8_640_ascend", block_size=4)
    found["transcode"] = apart("transcode", pages=pages, **layouts)
    stored = dict(kv_format="index_int8_130", block_size=4)
    near, far = torch.zeros(2, 520, dtype=torch.uint8), far_records("index_int8_130", 4).zero_()
    for cache in (near, far):
        run("store_rows", rows=torch.ones(2, 128), cache=cache, slot_mapping=torch.tensor([1, 6]), **stored)
    found["store_rows"] = same(far, near)
    return found
