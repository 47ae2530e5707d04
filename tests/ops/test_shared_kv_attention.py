"""shared_kv_attention: golden numbers, a query at a time, chunks, layouts, records, and merging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError, use
from kvbackend.codecs.records import pack_record, unpack_record
from kvbackend.ops import apply_rope, merge_attn_states, shared_kv_attention, store_rows
from kvbackend.rope import cos_sin_table
from tests.golden import wave

EXACT = dict(rtol=1e-12, atol=1e-12)
WINDOW, RATIO, TOPK, HEADS = 5, 2, 3, 3


@pytest.fixture(autouse=True)
def _reference():
    with use("reference"):
        yield


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Text:
    """One sequence of float64 rows, entries and queries, and any part of it as a call."""

    def __init__(self, length: int = 23, dim: int = 8) -> None:
        self.length, self.dim = length, dim
        self.q, self.kv, self.entries = draw(0, length, HEADS, dim), draw(1, length, dim), draw(2, length // RATIO, dim)
        self.sinks = draw(3, HEADS)
        self.topk = torch.full((length, TOPK), -1, dtype=torch.int32)
        for position in range(length):
            picks = torch.randperm((position + 1) // RATIO, generator=torch.Generator().manual_seed(position))[:TOPK]
            self.topk[position, : len(picks)] = picks.int()

    def call(self, start: int, end: int, ring: int = WINDOW, in_cache: bool = False, **change: Any) -> dict[str, Any]:
        """Queries start to end; the ring is one block, what it never held is NaN, and so are entries of the future."""
        window_cache = torch.full((2, ring, self.dim), torch.nan, dtype=torch.float64)
        for position in range(end if in_cache else start):
            window_cache[1, position % ring] = self.kv[position]
        blocks = -(-len(self.entries) // 4)
        compressed = torch.full((blocks + 1, 4, self.dim), torch.nan, dtype=torch.float64)
        for entry in range(end // RATIO):
            compressed[blocks - entry // 4, entry % 4] = self.entries[entry]
        return dict(
            q=self.q[start:end], window_cache=window_cache, window_table=counts(1)[None], seq_lens=counts(end),
            cu_seqlens_q=counts(0, end - start), max_seqlen_q=end - start, softmax_scale=0.3, window=WINDOW,
            kv=None if in_cache else self.kv[start:end], compressed_cache=compressed,
            block_table=torch.arange(blocks, -1, -1, dtype=torch.int32)[None], topk_indices=self.topk[start:end],
            compress_ratio=RATIO, sinks=self.sinks, return_lse=True,
        ) | change  # fmt: skip

    def run(self, start: int, end: int, **change: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return shared_kv_attention(**self.call(start, end, **change))


def by_hand(text: Text, position: int, chosen: list[int], sinks: torch.Tensor | None) -> tuple[Any, Any]:
    rows = [text.kv[p] for p in range(max(position - WINDOW + 1, 0), position + 1)]
    rows = torch.stack(rows + [text.entries[e] for e in chosen])
    logits = text.q[position] @ rows.T * 0.3
    if sinks is None:
        return logits.softmax(-1) @ rows, logits.logsumexp(-1)
    return torch.cat((logits, sinks[:, None]), -1).softmax(-1)[:, :-1] @ rows, logits.logsumexp(-1)


@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("selected", [True, False])
def test_equals_softmax_over_the_rows_a_query_sees(selected, with_sinks):
    text = Text()
    change = {} if selected else dict(topk_indices=None)
    out, lse = text.run(0, 23, **change, **({} if with_sinks else dict(sinks=None)))
    for position in range(23):
        chosen = [e for e in text.topk[position].tolist() if e >= 0] if selected else range((position + 1) // RATIO)
        want, want_lse = by_hand(text, position, list(chosen), text.sinks if with_sinks else None)
        assert_close(out[position], want, **EXACT)
        assert_close(lse[position], want_lse.float())


def golden_call(q: torch.Tensor, rows: torch.Tensor, sinks: list[float], scale: float) -> dict[str, Any]:
    """One query over entries alone: its window is in no block."""
    return dict(
        q=q[None], window_cache=torch.full((1, 1, q.shape[1]), torch.nan, dtype=torch.float64),
        window_table=counts(-1)[None], seq_lens=counts(len(rows)), cu_seqlens_q=counts(0, 1), max_seqlen_q=1,
        softmax_scale=scale, window=1, compressed_cache=rows[None], block_table=counts(0)[None],
        sinks=torch.tensor(sinks, dtype=torch.float64), return_lse=True,
    )  # fmt: skip


def test_golden_with_a_choice():
    call = golden_call(wave(8, 2, 8), wave(9, 7, 8), [0.3, -0.5], 8**-0.5)
    out, lse = shared_kv_attention(**call, topk_indices=counts(0, 2, -1, 5, 6)[None])
    golden = [
        [0.5458085, 0.39123634, 0.03727011, -0.33569088, -0.53756661, -0.46547087, -0.15614735, 0.23275685],
        [0.52286237, 0.57331151, 0.33157175, -0.07915395, -0.44953874, -0.59081558, -0.43098255, -0.05149875],
    ]
    assert_close(out[0], torch.tensor(golden, dtype=torch.float64), rtol=0, atol=5e-9)
    assert_close(lse[0], torch.tensor([2.12510529, 2.2103052]))


def test_golden_of_three_rows():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    q = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    out, lse = shared_kv_attention(**golden_call(q, rows, [0.5, -1.0], 2**-0.5))
    golden = [[0.60496040, 0.45162371], [0.53294223, 0.85742910]]
    assert_close(out[0], torch.tensor(golden, dtype=torch.float64), rtol=0, atol=5e-9)
    assert_close(lse[0], torch.tensor([1.62062114, 2.22207986]))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_nan_of_a_row_that_no_query_sees_stays_there(backend):
    """Of two queries of one sequence: entries that neither chose, window rows before the first one's."""
    call = Text().call(19, 21)
    call = {
        name: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in call.items()
    }
    with use(backend):
        clean = shared_kv_attention(**call)
        for entry in set(range(21 // RATIO)) - set(call["topk_indices"].flatten().tolist()):
            call["compressed_cache"][call["block_table"][0, entry // 4], entry % 4] = torch.nan
        call["window_cache"][1, (19 - WINDOW) % WINDOW] = torch.nan
        assert all(torch.equal(a, b) for a, b in zip(shared_kv_attention(**call), clean, strict=True))


def test_a_query_that_sees_nothing():
    call = golden_call(wave(8, 2, 8), wave(9, 7, 8), [0.3, -0.5], 8**-0.5)
    out, lse = shared_kv_attention(**call, topk_indices=counts(-1, -1)[None])
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("ring", [WINDOW - 1, WINDOW, 11, 30])
def test_chunks_and_rings_change_nothing(ring):
    """A ring of window - 1 rows is enough: the query brings its own. One that holds the whole text is paging."""
    text = Text()
    whole, whole_lse = text.run(0, 23, ring=ring)
    for size in (1, 2, 3, 7, 22):
        parts = [text.run(start, min(start + size, 23), ring=ring) for start in range(0, 23, size)]
        assert_close(torch.cat([out for out, _ in parts]), whole, **EXACT)
        assert_close(torch.cat([lse for _, lse in parts]), whole_lse)


@pytest.mark.parametrize("new", [1, 4])
def test_rows_that_are_in_the_cache_need_not_be_passed(new):
    text = Text()
    for end in range(new, 24):
        want = text.run(end - new, end)
        for ring in (WINDOW - 1 + new, 40):
            got = text.run(end - new, end, ring=ring, in_cache=True)
            assert_close(got[0], want[0], **EXACT)
            assert_close(got[1], want[1])


def test_a_ring_in_several_blocks():
    text = Text()
    call = text.call(20, 23, ring=6)
    ring = call["window_cache"][1].view(3, 2, 8)
    split = torch.full((7, 2, 8), torch.nan, dtype=torch.float64)
    split[[5, 0, 3]] = ring
    got = shared_kv_attention(**call | dict(window_cache=split, window_table=counts(5, 0, 3)[None]))
    assert_close(got[0], text.run(20, 23)[0], **EXACT)


def test_choosing_all_in_any_order_is_no_choice():
    text = Text()
    order = torch.randperm(11, generator=torch.Generator().manual_seed(5)).int()
    chosen = order.expand(23, -1)  # those of the future are not seen
    assert_close(text.run(0, 23, topk_indices=chosen)[0], text.run(0, 23, topk_indices=None)[0], **EXACT)


def test_window_and_entries_apart_merge_to_both():
    """One softmax over two sets of rows is their merge; the sinks come in once, at the end."""
    text = Text()
    both, both_lse = text.run(12, 23)
    window = text.run(12, 23, compressed_cache=None, block_table=None, topk_indices=None, sinks=None)
    entries = text.run(
        12, 23, kv=None, window_table=counts(-1)[None], sinks=None, window_cache=torch.zeros(1, 15, 8).double()
    )
    states = [window, entries]
    out, lse = merge_attn_states(torch.stack([o for o, _ in states]), torch.stack([s for _, s in states]))
    out = out * torch.sigmoid(both_lse - text.sinks)[..., None]
    assert_close(out, both, rtol=1e-6, atol=1e-6)
    assert_close(lse, both_lse)


@pytest.mark.parametrize(("sink", "kept"), [(-torch.inf, 1.0), (torch.inf, 0.0)])
def test_extreme_sinks(sink, kept):
    text = Text()
    plain, lse = text.run(0, 23, sinks=None)
    out, same = text.run(0, 23, sinks=torch.full((HEADS,), sink))
    assert_close(out, plain * kept, **EXACT)
    assert torch.equal(lse, same)


def test_rotates_back_at_the_position_of_the_query():
    text = Text()
    table = cos_sin_table(30, 4, 1e4, dtype=torch.float64)
    plain, _ = text.run(9, 20)
    want = apply_rope(plain, torch.arange(9, 20), table, interleaved=True, trailing=True, inverse=True)
    assert_close(text.run(9, 20, cos_sin=table)[0], want, **EXACT)


@pytest.mark.parametrize(
    ("window_format", "kv_format"),
    [
        ("v4_fp8_584", "v4_fp8_584"),
        ("v4_fp8_584_ascend", "v4_fp8_640_ascend"),
        ("v41_fp8_528", "v41_fp8_528"),
        ("v41_fp8_528", "v41_fp4_288"),
        ("v41_fp8_528_planar", "v41_fp4_288_planar"),
    ],
)
def test_records_are_the_rows_they_give_back(window_format, kv_format):
    text = Text(dim=512)

    def as_stored(rows: torch.Tensor, name: str) -> torch.Tensor:
        return unpack_record(pack_record(rows[:, None], name), name, 1, torch.float64)[:, 0]

    text.kv, text.entries = as_stored(text.kv, window_format), as_stored(text.entries, kv_format)
    want, _ = text.run(0, 23)
    for start in (0, 1, 8, 22):
        call = text.call(start, 23)
        ring = torch.full((2, pack_record(call["window_cache"][:1], window_format).shape[1]), 0xFF, dtype=torch.uint8)
        kept = range(max(start - WINDOW, 0), start)
        store_rows(text.kv[list(kept)], ring, torch.tensor([WINDOW + p % WINDOW for p in kept]).long(), window_format)
        entries = pack_record(call["compressed_cache"].nan_to_num(0), kv_format)
        change = dict(window_cache=ring, compressed_cache=entries, window_format=window_format, kv_format=kv_format)
        assert_close(shared_kv_attention(**call | change)[0], want[start:], **EXACT)


def test_a_row_of_a_batch_is_the_sequence_alone():
    text = Text()
    spans = [(3, 9), (0, 0), (22, 23), (0, 5)]
    calls = [text.call(start, end, ring=6) for start, end in spans]
    batch = dict(calls[0])
    for name in ("q", "kv", "topk_indices"):
        batch[name] = torch.cat([call[name] for call in calls])
    batch["window_cache"] = torch.cat([call["window_cache"] for call in calls])
    batch["compressed_cache"] = torch.cat([call["compressed_cache"] for call in calls])
    blocks = len(calls[0]["compressed_cache"])
    batch["block_table"] = torch.cat([call["block_table"] + i * blocks for i, call in enumerate(calls)])
    batch["window_table"] = counts(1, 3, 5, 7)[:, None]
    batch["seq_lens"] = counts(*[end for _, end in spans])
    batch["cu_seqlens_q"] = counts(0, 6, 6, 7, 12)
    out, _ = shared_kv_attention(**batch)
    alone = torch.cat([shared_kv_attention(**call)[0] for call in calls])
    assert_close(out, alone, **EXACT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=0), "window is 0; it must be at least 1"),
        (dict(window=7), "window_table names 5 rows; the window needs 6 earlier ones"),
        (dict(compress_ratio=0), "compress_ratio is 0; it must be 1 or more"),
        (dict(kv=torch.zeros(3, 8)), "kv is torch.float32 but q is torch.float64"),
        (dict(block_table=None), "only compressed_cache is given; compressed_cache and block_table come together"),
        (dict(compressed_cache=None, block_table=None), "topk_indices is given without compressed_cache"),
        (dict(compressed_cache=torch.zeros(3, 4, 9).double()), "compressed_cache holds rows of 9 numbers; q has 8"),
        (dict(window_format="v4_fp8_584"), "window_cache is torch.float64 with 3 dims; records of 'v4_fp8_584'"),
        (dict(window_format="index_fp8_132"), "kv_format is 'index_fp8_132', whose records hold index_key"),
        (dict(cos_sin=torch.zeros(30, 10)), "cos_sin rotates 10 dims but rows have 8"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match=message):
        Text().run(20, 23, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(topk_indices=counts(1, 0, 1).expand(3, -1)), "topk_indices names an entry twice"),
        (dict(window_table=counts(2)[None]), r"window_table holds block 2 at index 0; it must be in \[-1, 2\)"),
        (dict(kv=None), "window_table names 5 rows; without kv they must hold the window of the first of 3 queries"),
        (dict(block_table=counts(0, 1)[None]), r"seq_lens holds length 23 at index 0; it must be in \[0, 18\)"),
        (dict(cos_sin=torch.zeros(22, 4)), r"seq_lens holds length 23 at index 0; it must be in \[0, 23\)"),
    ],
)
def test_values(change, message, monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    with pytest.raises(ArgumentError, match=message):
        Text().run(20, 23, **change)


def test_queries_that_q_lacks_move_no_other() -> None:
    """Those that are there stand where cu_seqlens_q puts them, and pages hold what was before the whole chunk."""
    args = dict(shared_kv_attention.make_samples("cpu", torch.float32))["chunked prefill"]
    whole, _ = shared_kv_attention(**args)
    cut = {name: args[name][:-1] for name in ("q", "kv", "topk_indices") if args.get(name) is not None}
    assert_close(shared_kv_attention(**args | cut)[0], whole[:-1])
