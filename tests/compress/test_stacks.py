"""Eviction over quantized pages: it does with codes what it does with the numbers that the codes read as."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbackend
from kvbackend import ArgumentError, formats, ops
from kvbackend.cache import GqaLayer, PagedCache
from kvbackend.compress import H2O, EvictingCache, L2Norm, Policy, PyramidKV, SnapKV, StreamingLLM
from tests.cache.rows import nan_cache, round_trip

LAYER = GqaLayer(2, 32)
SCALE = 0.2
STEPS = (41, 1, 1, 7, 1)
FORMATS = ["int8", "fp8_e4m3", "fp8_e4m3:token_head", "fp8_e5m2:32", "mxfp4/int8", "nvfp4", "fp4_e2m1", "auto/mxfp8"]
POLICIES = {
    "streaming": lambda: StreamingLLM(20, sinks=2),
    "h2o": lambda: H2O(20),
    "snapkv": lambda: SnapKV(20, observed=6, kernel=3),
    "l2": lambda: L2Norm(20),
}


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with kvbackend.use("reference"):
        yield


def cache_of(kv_format: str) -> PagedCache:
    return nan_cache((LAYER,), 50, 4, kv_format=kv_format)


def coded(kv_format: str, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Rows as a cache in this format gives them back."""
    scale = torch.ones(1) if kv_format in ("fp8_e4m3", "nvfp4") else None
    return [round_trip(rows, name, scale) for name, rows in zip(formats.pair(kv_format), (keys, values), strict=True)]


def feed(kept: EvictingCache, seq: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One step of a model of one layer, and eviction."""
    slots, pages = kept.append([seq], [len(q)]), kept.pages(0)
    pages.write(slots[0], keys, values)
    batch = kept.batch(0, [seq], [len(q)])
    out, _ = ops.paged_attention(q, **pages.arguments, **batch, softmax_scale=SCALE)
    kept.observe(0, [seq], [len(q)], q, SCALE)
    kept.evict([seq])
    return out


@pytest.mark.parametrize("summary_slots", [0, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_codes_are_kept_like_the_numbers_they_read_as(kv_format: str, policy: str, summary_slots: int) -> None:
    stacked, plain = (
        EvictingCache(cache_of(name), POLICIES[policy](), summary_slots=summary_slots) for name in (kv_format, "auto")
    )
    draw = torch.Generator().manual_seed(5)
    seqs = stacked.new_sequence(), plain.new_sequence()
    for count in STEPS:
        q, keys, values = (torch.randn(count, heads, 32, generator=draw) for heads in (4, 2, 2))
        got = feed(stacked, seqs[0], q, keys, values)
        want = feed(plain, seqs[1], q, *coded(kv_format, keys, values))
        assert torch.equal(stacked.kept(seqs[0]), plain.kept(seqs[1]))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        rows, plain_rows = (kept.cache.read(0, 0) for kept in (stacked, plain))
        bias = plain._bias[0]
        summary = torch.zeros(len(rows[0]), 2, dtype=torch.bool)
        if bias is not None:
            summary = plain._rows_of(bias, 0) > 0
            for side, after in enumerate(coded(kv_format, *plain_rows)):  # what a summary becomes when it is coded
                torch.testing.assert_close(rows[side][summary], after[summary], rtol=1e-5, atol=1e-5)
                plain_rows[side][summary] = rows[side][summary]  # from here on both caches hold the same
            plain.cache.layers[0].write(plain._slots(0), *plain_rows)
        for side in (0, 1):
            assert torch.equal(rows[side][~summary], plain_rows[side][~summary])
    assert stacked.rows(seqs[0]) < stacked.tokens(seqs[0])


def test_memory_falls_by_both_to_the_byte() -> None:
    used: dict[str, int] = {}
    for name in ("auto", "fp4_e2m1"):
        kept = EvictingCache(cache_of(name), StreamingLLM(20, sinks=2))
        draw = torch.Generator().manual_seed(5)
        seq = kept.new_sequence()
        feed(kept, seq, *(torch.randn(41, heads, 32, generator=draw) for heads in (4, 2, 2)))
        assert kept.cache.blocks_used == 20 // 4
        assert kept.used_bytes == 20 * (kept.cache.bytes_per_token + 4)  # a position of 4 bytes beside each row
        used[name] = kept.cache.blocks_used * kept.cache.block_bytes
    assert used == {"auto": 20 * 2 * 2 * 32 * 4, "fp4_e2m1": 20 * 2 * 2 * (16 + 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kv_format="int4"), "cache has kv_format 'int4', whose keys share scales across tokens"),
        (dict(kv_format="int8", keep_recent=4), "cache keeps recent or first tokens in full precision"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        EvictingCache(PagedCache([LAYER], 8, 32, torch.float32, **options), StreamingLLM(20))


def test_budgets_by_layer_over_codes() -> None:
    policy: Policy = PyramidKV(24, observed=4, kernel=3)
    kept = EvictingCache(cache_of("int8"), policy, num_layers=3)
    seq = kept.new_sequence()
    slots = kept.append([seq], [60])
    draw = torch.Generator().manual_seed(1)
    for layer in range(3):
        q, keys, values = (torch.randn(60, heads, 32, generator=draw) for heads in (4, 2, 2))
        kept.pages(layer).write(slots[layer], keys, values)
        kept.observe(layer, [seq], [60], q, SCALE)
        want = coded("int8", keys, values)[0]
    kept.evict([seq])
    rows = [kept.rows(seq, layer) for layer in range(3)]
    assert rows[0] > rows[1] > rows[2]
    last = kept.cache.read(0, 2)[0]
    for head, positions in enumerate(kept.kept(seq, 2).tolist()):
        assert torch.equal(last[:, head], want[positions, head])
