"""PagedCache against plain Python: a list of token numbers per sequence, and what each number's rows must read."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvbackend
from kvbackend import ArgumentError, ops
from kvbackend.cache import GqaLayer, MlaLayer, OutOfBlocks, PagedCache

from .rows import CODES, all_pages, nan_cache, rows_of, snapshot, stored, tables, write

GQA = (GqaLayer(kv_heads=2, head_dim=3), GqaLayer(kv_heads=1, head_dim=4))
UNEVEN = (GqaLayer(kv_heads=2, head_dim=3, value_dim=5),)
MLA = (MlaLayer(kv_lora_rank=6, qk_rope_head_dim=2),) * 2
MIXED = (GQA[0], MLA[0])

WIDE = (GqaLayer(kv_heads=2, head_dim=32), GqaLayer(kv_heads=1, head_dim=64))
WIDE_MLA = (MlaLayer(kv_lora_rank=32, qk_rope_head_dim=4),)

# (layers, block_size, layout)
CONFIGS = [
    pytest.param(GQA, 1, "NHD", id="gqa-1-NHD"),
    pytest.param(GQA, 2, "HND", id="gqa-2-HND"),
    pytest.param(GQA, 16, "interleaved", id="gqa-16-interleaved"),
    pytest.param(UNEVEN, 61, "NHD", id="uneven-61-NHD"),
    pytest.param(MLA, 1, "interleaved", id="mla-1-interleaved"),
    pytest.param(MLA, 2, "NHD", id="mla-2-NHD"),
    pytest.param(MLA, 61, "interleaved", id="mla-61-interleaved"),
    pytest.param(MIXED, 16, "HND", id="mixed-16-HND"),
]

# (layers, block_size, layout, further options)
FORMATS = [
    pytest.param(GQA, 2, "HND", dict(kv_format="int8"), id="int8"),
    pytest.param(UNEVEN, 61, "NHD", dict(kv_format="fp8_e4m3:token_head"), id="fp8-token-head-uneven"),
    pytest.param(GQA, 16, "interleaved", dict(kv_format="fp8_e4m3"), id="fp8-static"),
    pytest.param(WIDE, 2, "NHD", dict(kv_format=["mxfp4", "fp8_e4m3:32"]), id="per-layer"),
    pytest.param(WIDE, 4, "HND", dict(kv_format="int8/fp4_e2m1"), id="keys-and-values"),
    pytest.param(WIDE, 1, "NHD", dict(kv_format="nvfp4", scales=[dict(k_scale=torch.tensor([0.01]))] * 2), id="nvfp4"),
    pytest.param(MIXED, 2, "NHD", dict(kv_format="fp8_e5m2:token_head"), id="mixed"),
    pytest.param(WIDE_MLA, 16, "HND", dict(kv_format="fp4_e2m1"), id="mla-fp4"),
    pytest.param(WIDE, 2, "NHD", dict(kv_format="mxfp4", keep_recent=3, keep_sinks=1), id="recent-and-sinks"),
    pytest.param(MIXED, 3, "NHD", dict(kv_format=["auto", "int8"], keep_recent=1), id="recent-of-one-layer"),
    pytest.param(MLA, 2, "NHD", dict(kv_format="int8", keep_sinks=3), id="sinks"),
]


class CacheMachine(RuleBasedStateMachine):
    layers: tuple[Any, ...]
    block_size: int
    layout: str
    options: ClassVar[dict[str, Any]] = {}

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        self.num_blocks = data.draw(st.integers(2, 40 if self.block_size < 16 else 12))
        options = dict(self.options)
        if "keep_recent" in options or "keep_sinks" in options:
            options["keep_blocks"] = self.num_blocks
        self.cache = nan_cache(self.layers, self.num_blocks, self.block_size, layout=self.layout, **options)
        self.tokens: dict[int, list[int]] = {}
        self.full: dict[int, set[int]] = {}  # which blocks of a sequence are kept in full precision too
        self.gone: list[int] = []
        self.next_number = 0
        self.new()

    # the model's part

    def ids(self) -> list[int]:
        return list(self.tokens)

    def holders(self) -> Counter[int]:
        return Counter(chain.from_iterable(tables(self.cache, self.ids())))

    def needs(self, counts: dict[int, int]) -> int:
        """Blocks that an append takes: for growth, and for a copy of what is shared, less one if all sharers write."""
        grown = sum(
            -(-(len(self.tokens[seq]) + n) // self.block_size) - -(-len(self.tokens[seq]) // self.block_size)
            for seq, n in counts.items()
        )
        writing = [seq for seq, n in counts.items() if n and len(self.tokens[seq]) % self.block_size]
        wanted = Counter(tables(self.cache, [seq])[0][-1] for seq in writing)
        holders = self.holders()
        return grown + sum(min(count, holders[block] - 1) for block, count in wanted.items())

    def state(self) -> tuple[Any, ...]:
        batch = self.cache.batch(self.ids(), [0] * len(self.ids()))
        counts = [self.cache.pool.ref_count(block) for block in range(self.num_blocks)]
        return batch["block_table"].tolist(), batch["seq_lens"].tolist(), counts, self.cache.sequences

    # what users do

    @precondition(lambda self: len(self.tokens) < 3)
    @rule()
    def new(self) -> None:
        seq = self.cache.new_sequence()
        assert seq not in self.tokens
        assert seq not in self.gone
        self.tokens[seq] = []
        self.full[seq] = set()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.sampled_from(self.ids()), unique=True, min_size=1, max_size=4))
        most = 3 * self.block_size // 2 + 2
        self.append_tokens({seq: data.draw(st.one_of(st.integers(0, 3), st.integers(0, most))) for seq in seqs})

    @precondition(lambda self: self.tokens)
    @rule()
    def append_one_to_each(self) -> None:
        self.append_tokens(dict.fromkeys(self.ids(), 1))

    def append_tokens(self, counts: dict[int, int]) -> None:
        seqs = list(counts)
        before, state, holders, needs = snapshot(self.cache), self.state(), self.holders(), self.needs(counts)
        if needs > self.cache.blocks_free:
            with pytest.raises(OutOfBlocks) as caught:
                self.cache.append_batch(seqs, list(counts.values()))
            assert (caught.value.wanted, caught.value.free) == (needs, self.cache.blocks_free)
            assert self.state() == state
            assert all(map(torch.equal, snapshot(self.cache), before))
            return
        free = self.cache.blocks_free
        slots = self.cache.append_batch(seqs, list(counts.values()))
        assert self.cache.blocks_free == free - needs
        self.check_slots(slots, counts)
        # Copies went to blocks that nobody held, and nowhere else.
        for now, then in zip(snapshot(self.cache), before, strict=True):
            assert all(torch.equal(now[block], then[block]) for block in holders)
        numbers = list(range(self.next_number, self.next_number + sum(counts.values())))
        self.next_number += len(numbers)
        copied = snapshot(self.cache)
        write(self.cache, slots, numbers)
        for now, then in zip(snapshot(self.cache), copied, strict=True):
            changed = (now != then).reshape(self.num_blocks * self.block_size, -1).any(1).nonzero().flatten()
            assert set(changed.tolist()) <= set(slots.tolist())
        for seq, n in counts.items():
            begun = -(-len(self.tokens[seq]) // self.block_size)
            self.tokens[seq] += numbers[:n]
            del numbers[:n]
            self.keep(seq, begun)

    def keep(self, seq: int, begun: int) -> None:
        """Blocks from `begun` on are new; those of the first and last tokens are kept, if they were or are new."""
        length = len(self.tokens[seq])
        first, last = range(self.options.get("keep_sinks", 0)), self.options.get("keep_recent", 0)
        wanted = {p // self.block_size for p in [*first, *range(max(length - last, 0), length)] if p < length}
        self.full[seq] = {i for i in wanted if i in self.full[seq] or i >= begun}

    def check_slots(self, slots: Tensor, counts: dict[int, int]) -> None:
        assert slots.dtype is torch.int64
        found = slots.tolist()
        assert len(set(found)) == len(found) == sum(counts.values())
        assert all(self.cache.pool.ref_count(slot // self.block_size) == 1 for slot in found)
        expected = []
        for (seq, n), table in zip(counts.items(), tables(self.cache, list(counts)), strict=True):
            start = len(self.tokens[seq])
            expected += [
                table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, start + n)
            ]
        assert found == expected

    @precondition(lambda self: 0 < len(self.tokens) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.ids()))
        free = self.cache.blocks_free
        child = self.cache.fork(parent)
        assert child not in self.tokens
        assert child not in self.gone
        self.tokens[child] = list(self.tokens[parent])
        self.full[child] = set(self.full[parent])
        assert self.cache.blocks_free == free
        assert tables(self.cache, [child]) == tables(self.cache, [parent])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.ids()))
        length = data.draw(st.integers(0, len(self.tokens[seq])))
        self.cache.truncate(seq, length)
        del self.tokens[seq][length:]
        self.full[seq] = {i for i in self.full[seq] if i * self.block_size < length}

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.ids()))
        self.cache.free(seq)
        del self.tokens[seq]
        self.gone.append(seq)

    # what must hold after each step, and at the end

    def check_misuse(self, bad: int) -> None:
        good, state = self.ids(), self.state()
        calls = [
            lambda: self.cache.append_batch([*good, bad], [1] * (len(good) + 1)),
            lambda: self.cache.batch([*good, bad], [0] * (len(good) + 1)),
            lambda: self.cache.fork(bad),
            lambda: self.cache.truncate(bad, 0),
            lambda: self.cache.free(bad),
            lambda: self.cache.length(bad),
        ]
        for call in calls:
            with pytest.raises(ArgumentError, match=f"seq is {bad}, which"):
                call()
        for seq in good:
            with pytest.raises(ArgumentError, match="truncate keeps from 0 to all"):
                self.cache.truncate(seq, len(self.tokens[seq]) + 1)
            with pytest.raises(ArgumentError, match="once"):
                self.cache.append_batch([*good, seq], [1] * (len(good) + 1))
        assert self.state() == state

    @invariant()
    def contents(self) -> None:
        seqs = self.ids()
        lengths = [len(tokens) for tokens in self.tokens.values()]
        assert [self.cache.length(seq) for seq in seqs] == lengths
        batch = self.cache.batch(seqs, lengths)
        numbers = list(chain.from_iterable(self.tokens.values()))
        where = dict(block_table=batch["block_table"], cu_seqlens=batch["cu_seqlens_q"], num_tokens=len(numbers))
        for layer, pages in enumerate(self.cache.layers):
            for arguments, want in zip(pages.gather_arguments, stored(self.cache, layer, numbers), strict=True):
                assert torch.equal(ops.gather_cache(**arguments, **where), want)
        for seq in seqs if self.cache.kept else []:
            numbers = self.tokens[seq]
            kept = torch.tensor([p // self.block_size in self.full[seq] for p in range(len(numbers))], dtype=torch.bool)
            layer = len(self.layers) - 1
            assert all(map(torch.equal, self.cache.read(layer, seq), stored(self.cache, layer, numbers, kept)))

    @invariant()
    def figures(self) -> None:
        cache, holders = self.cache, self.holders()
        assert [cache.pool.ref_count(block) for block in range(self.num_blocks)] == [
            holders[block] for block in range(self.num_blocks)
        ]
        assert cache.sequences == tuple(self.tokens)
        assert cache.blocks_used == len(holders)
        assert cache.blocks_free + cache.blocks_used == cache.blocks_total == self.num_blocks
        # Equal numbers are one row, unless copy-on-write made two: count places, not numbers.
        places = {
            (table[p // self.block_size], p % self.block_size)
            for seq, table in zip(self.ids(), tables(cache, self.ids()), strict=True)
            for p in range(len(self.tokens[seq]))
        }
        full_rows = {(block, p) for (block, p), seq, i in self.rows_by_place() if i in self.full[seq]}
        assert cache.used_bytes == len(places) * cache.bytes_per_token + len(full_rows) * cache.kept_bytes_per_token
        kept_blocks = {block for block, _ in full_rows}
        assert (cache.kept.pool.num_used if cache.kept else 0) == len(kept_blocks)
        held = cache.blocks_used * cache.block_bytes + len(kept_blocks) * self.block_size * cache.kept_bytes_per_token
        assert cache.used_bytes <= held <= cache.allocated_bytes

    def rows_by_place(self):
        """((block, row), sequence, index of the block in it) of every token."""
        for seq, table in zip(self.ids(), tables(self.cache, self.ids()), strict=True):
            for p in range(len(self.tokens[seq])):
                yield (table[p // self.block_size], p % self.block_size), seq, p // self.block_size

    def teardown(self) -> None:
        for bad in [*self.gone[-1:], -1, 10**6]:
            self.check_misuse(bad)
        for seq in self.ids():
            self.cache.free(seq)
        assert self.cache.blocks_free == self.num_blocks
        assert self.cache.used_bytes == 0


@pytest.mark.parametrize(("layers", "block_size", "layout"), CONFIGS)
def test_any_order_of_operations(layers: tuple[Any, ...], block_size: int, layout: str) -> None:
    machine = type("Machine", (CacheMachine,), dict(layers=layers, block_size=block_size, layout=layout))
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=30, deadline=None))


@pytest.mark.parametrize(("layers", "block_size", "layout", "options"), FORMATS)
def test_any_order_of_operations_on_codes(
    layers: tuple[Any, ...], block_size: int, layout: str, options: dict[str, Any]
) -> None:
    fields = dict(layers=layers, block_size=block_size, layout=layout, options=options)
    machine = type("Machine", (CacheMachine,), fields)
    with kvbackend.use("reference", CODES):
        run_state_machine_as_test(machine, settings=settings(max_examples=5, stateful_step_count=20, deadline=None))


# ------------------------------------------------------------------------------------------------ copy-on-write


def filled(cache: PagedCache, count: int) -> int:
    seq = cache.new_sequence()
    write(cache, cache.append(seq, count), list(range(count)))
    return seq


@pytest.mark.parametrize(("layers", "block_size", "layout"), CONFIGS)
def test_a_fork_that_appends_leaves_the_parent_byte_for_byte(layers, block_size: int, layout: str) -> None:
    cache = nan_cache(layers, 8, block_size, layout=layout)
    length = block_size + block_size // 2  # the last block is partly filled, unless a block holds one token
    parent = filled(cache, length)
    child = cache.fork(parent)
    own, before = tables(cache, [parent])[0], snapshot(cache)
    write(cache, cache.append(child, 1), [100])
    write(cache, cache.append(parent, 1), [200])  # the parent is alone in its block again and needs no copy
    assert tables(cache, [parent])[0][: len(own)] == own
    for now, then in zip(snapshot(cache), before, strict=True):
        for p in range(length):
            where = own[p // block_size], p % block_size
            assert torch.equal(now[where], then[where])
    for layer in range(len(layers)):
        ours, theirs = cache.read(layer, parent), cache.read(layer, child)
        for part in range(2):
            shape = ours[part].shape[1:]
            assert torch.equal(ours[part], rows_of([*range(length), 200], 2 * layer + part, shape))
            assert torch.equal(theirs[part], rows_of([*range(length), 100], 2 * layer + part, shape))


def test_the_last_holder_of_a_block_keeps_it() -> None:
    cache = nan_cache(GQA, 4, 4)
    parent = filled(cache, 2)
    family = [parent, cache.fork(parent), cache.fork(parent)]
    assert cache.blocks_used == 1
    slots = cache.append_batch(family, [1, 1, 1])  # two copies, not three
    assert cache.blocks_used == 3
    assert tables(cache, family)[2] == [0]
    assert slots.tolist() == [1 * 4 + 2, 2 * 4 + 2, 0 * 4 + 2]
    write(cache, slots, [7, 8, 9])
    for seq, last in zip(family, [7, 8, 9], strict=True):
        assert torch.equal(cache.read(0, seq)[0], rows_of([0, 1, last], 0, torch.Size([2, 3])))


def test_appending_nothing_copies_nothing() -> None:
    cache = nan_cache(GQA, 4, 4)
    child = cache.fork(filled(cache, 2))
    assert cache.append(child, 0).shape == (0,)
    assert cache.append_batch([], []).shape == (0,)
    assert cache.blocks_used == 1


def test_truncate_then_append_overwrites_only_where_no_one_shares() -> None:
    cache = nan_cache(GQA, 8, 4)
    seq = filled(cache, 10)
    (table,) = tables(cache, [seq])
    cache.truncate(seq, 5)
    assert cache.blocks_used == 2
    slots = cache.append(seq, 2)
    assert slots.tolist() == [table[1] * 4 + 1, table[1] * 4 + 2]
    write(cache, slots, [50, 51])
    child = cache.fork(seq)
    cache.truncate(child, 6)  # shares a block of which the parent uses more
    slots = cache.append(child, 1)
    assert slots.tolist()[0] // 4 not in table[:2]
    write(cache, slots, [60])
    shape = torch.Size([2, 3])
    assert torch.equal(cache.read(0, seq)[0], rows_of([0, 1, 2, 3, 4, 50, 51], 0, shape))
    assert torch.equal(cache.read(0, child)[0], rows_of([0, 1, 2, 3, 4, 50, 60], 0, shape))


def test_a_failing_copy_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = nan_cache(MLA, 6, 4)
    parent = filled(cache, 6)
    child = cache.fork(parent)
    own = tables(cache, [parent, child])

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(ops, "copy_blocks", fail)
    with pytest.raises(RuntimeError, match="no kernel"):
        cache.append_batch([child, parent], [1, 7])
    assert tables(cache, [parent, child]) == own
    assert (cache.length(parent), cache.length(child)) == (6, 6)
    assert [cache.pool.ref_count(block) for block in range(6)] == [2, 2, 0, 0, 0, 0]
    monkeypatch.undo()
    assert cache.append(child, 1).tolist() == [2 * 4 + 2]


# ---------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("block_size", [1, 2, 16, 61])
def test_attention_over_the_cache_equals_dense_attention(block_size: int, layout: str) -> None:
    torch.manual_seed(0)
    heads, layer = 4, GqaLayer(kv_heads=2, head_dim=8)
    cache = nan_cache((layer,), 200 // block_size + 10, block_size, layout=layout)
    dense: dict[int, tuple[Tensor, Tensor]] = {}

    def step(seqs: list[int], q_lens: list[int]) -> None:
        q = torch.randn(sum(q_lens), heads, 8)
        key, value = torch.randn(2, sum(q_lens), 2, 8)
        cache.layers[0].write(cache.append_batch(seqs, q_lens), key, value)
        out, _ = ops.paged_attention(q, *cache.layers[0].caches, **cache.batch(seqs, q_lens), softmax_scale=8**-0.5)
        for seq, rows in zip(seqs, zip(*(x.split(q_lens) for x in (q, key, value, out)), strict=True), strict=True):
            mine, theirs = dense.get(seq, (key[:0], value[:0])), rows
            k, v = torch.cat((mine[0], theirs[1])), torch.cat((mine[1], theirs[2]))
            dense[seq] = k, v
            mask = torch.ones(len(theirs[0]), len(k), dtype=torch.bool).tril(len(k) - len(theirs[0]))
            qh, kh, vh = (x.transpose(0, 1).double() for x in (theirs[0], k, v))
            want = scaled_dot_product_attention(
                qh, kh.repeat_interleave(2, 0), vh.repeat_interleave(2, 0), attn_mask=mask, scale=8**-0.5
            )
            torch.testing.assert_close(theirs[3].transpose(0, 1).double(), want, rtol=1e-5, atol=1e-5)

    a, b = cache.new_sequence(), cache.new_sequence()
    step([a, b], [17, 5])  # prefill
    step([b, a], [9, 1])  # chunked prefill beside decode
    c = cache.fork(a)
    dense[c] = dense[a]
    step([a, b, c], [1, 1, 1])
    cache.truncate(a, 11)
    dense[a] = tuple(x[:11] for x in dense[a])  # type: ignore[assignment]
    step([c, a], [3, 4])
    cache.free(c)
    step([a, b], [1, 0])


@pytest.mark.parametrize("layout", ["NHD", "interleaved"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_mla_attention_over_the_cache_equals_dense_attention(block_size: int, layout: str) -> None:
    torch.manual_seed(0)
    cache = nan_cache((MlaLayer(kv_lora_rank=16, qk_rope_head_dim=4),), 60, block_size, layout=layout)
    ckv, kpe = torch.randn(23, 16), torch.randn(23, 4)
    seq = cache.new_sequence()
    cache.layers[0].write(cache.append(seq, 19), ckv[:19], kpe[:19])
    child = cache.fork(seq)
    cache.layers[0].write(cache.append(child, 4), ckv[19:], kpe[19:])
    cache.layers[0].write(cache.append(seq, 4), torch.randn(4, 16), torch.randn(4, 4))
    q_nope, q_pe = torch.randn(4, 3, 16), torch.randn(4, 3, 4)
    out, _ = ops.mla_attention(q_nope, q_pe, *cache.layers[0].caches, **cache.batch([child], [4]), softmax_scale=0.3)
    q, k = torch.cat((q_nope, q_pe), -1).double(), torch.cat((ckv, kpe), -1).double()
    logits = torch.einsum("qhd,kd->hqk", q, k) * 0.3
    mask = torch.ones(4, 23, dtype=torch.bool).tril(19)
    want = torch.einsum("hqk,kd->qhd", logits.masked_fill(~mask, -torch.inf).softmax(-1), ckv.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_batch_describes_sequences_in_the_order_asked_for() -> None:
    cache = nan_cache(GQA, 8, 4)
    a, b = filled(cache, 9), filled(cache, 2)
    batch = cache.batch([b, a], [1, 5])
    assert batch["block_table"].tolist() == [[3, -1, -1], [0, 1, 2]]
    assert batch["seq_lens"].tolist() == [2, 9]
    assert batch["cu_seqlens_q"].tolist() == [0, 1, 6]
    assert batch["max_seqlen_q"] == 5
    assert {batch[name].dtype for name in ("block_table", "seq_lens", "cu_seqlens_q")} == {torch.int32}
    empty = cache.batch([], [])
    assert (empty["block_table"].shape, empty["cu_seqlens_q"].tolist(), empty["max_seqlen_q"]) == ((0, 0), [0], 0)


# ------------------------------------------------------------------------------------------------------ figures


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype, size: int, layout: str) -> None:
    cache = PagedCache(MIXED, 7, 16, dtype, layout=layout)
    numbers = 2 * 2 * 3 + (6 + 2)  # of one token: MLA's row counts once
    assert cache.bytes_per_token == numbers * size
    assert cache.block_bytes == 16 * numbers * size
    assert cache.allocated_bytes == 7 * 16 * numbers * size == sum(pages.nbytes for pages in all_pages(cache))


@pytest.mark.parametrize(
    ("layers", "bytes_per_token"),
    [
        ([GqaLayer(8, 128)] * 32, 131072),  # Llama-3-8B
        ([MlaLayer(512, 64)] * 61, 70272),  # DeepSeek-V3
        ([GqaLayer(32, 128)] * 32, 524288),  # Llama-2-7B
    ],
)
def test_published_models_in_bf16(layers: list[Any], bytes_per_token: int) -> None:
    assert sum(layer.bytes_per_token(torch.bfloat16) for layer in layers) == bytes_per_token


def test_bytes_of_values_narrower_or_wider_than_keys() -> None:
    cache = PagedCache(UNEVEN, 3, 4, torch.bfloat16)
    assert cache.bytes_per_token == 2 * (3 + 5) * 2
    assert cache.allocated_bytes == 3 * 4 * cache.bytes_per_token


def test_used_bytes_count_a_shared_row_once() -> None:
    cache = nan_cache(GQA, 8, 4)
    seq = filled(cache, 6)
    child = cache.fork(seq)
    assert cache.used_bytes == 6 * cache.bytes_per_token
    cache.truncate(seq, 5)
    assert cache.used_bytes == 6 * cache.bytes_per_token
    cache.append(child, 1)  # copies the block that holds rows 4 and 5
    assert cache.used_bytes == (4 + 1 + 3) * cache.bytes_per_token
    assert cache.blocks_used == 3


def test_with_memory_takes_as_many_blocks_as_fit() -> None:
    block_bytes = 16 * sum(layer.bytes_per_token(torch.bfloat16) for layer in MIXED)
    for memory_bytes, blocks in [(block_bytes, 1), (10 * block_bytes - 1, 9), (10 * block_bytes, 10)]:
        cache = PagedCache.with_memory(memory_bytes, MIXED, 16, torch.bfloat16, layout="HND")
        assert cache.blocks_total == blocks
        assert cache.allocated_bytes == blocks * block_bytes <= memory_bytes
    with pytest.raises(ArgumentError, match=f"one block of 16 tokens takes {block_bytes} bytes in 2 layers"):
        PagedCache.with_memory(block_bytes - 1, MIXED, 16, torch.bfloat16)


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GqaLayer(0, 8), "kv_heads of GqaLayer is 0"),
        (lambda: GqaLayer(1, 8, 0), "value_dim of GqaLayer is 0"),
        (lambda: MlaLayer(8, -1), "qk_rope_head_dim of MlaLayer is -1"),
        (lambda: PagedCache([], 4, 4, torch.float32), "layers is empty"),
        (lambda: PagedCache(GQA, 0, 4, torch.float32), "num_blocks is 0"),
        (lambda: PagedCache(GQA, 2.5, 4, torch.float32), "num_blocks is 2.5; it must be a whole number"),
        (lambda: PagedCache(GQA, 2, "4", torch.float32), "block_size is '4'; it must be a whole number"),
        (lambda: PagedCache(GQA, 2, 4, torch.float32, "nowhere"), "device is 'nowhere'; torch cannot use it here"),
        (lambda: PagedCache(GQA, 2**31, 4, torch.float32), "num_blocks is 2147483648"),
        (lambda: PagedCache(GQA, 4, 0, torch.float32), "block_size is 0"),
        (lambda: PagedCache(GQA, 4, 4, torch.int32), "dtype is 'int32'"),
        (lambda: PagedCache(GQA, 4, 4, torch.float32, layout="BSND"), "layout is 'BSND'"),
        (lambda: PagedCache(MLA, 4, 4, torch.float32, layout="BSND"), "layout is 'BSND'"),
        (lambda: PagedCache(UNEVEN, 4, 4, torch.float32, layout="interleaved"), "choose NHD or HND"),
    ],
)
def test_bad_sizes(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_bad_batches() -> None:
    cache = nan_cache(GQA, 4, 4)
    a, b = filled(cache, 3), filled(cache, 3)
    for seqs, counts, message in [
        ([a, b], [1], "num_tokens has 1 entries for 2 sequences"),
        ([a, b], [1, -1], f"num_tokens is -1 for sequence {b}"),
        ([a, a], [1, 1], f"seqs names sequence {a} 2 times"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            cache.append_batch(seqs, counts)
    with pytest.raises(ArgumentError, match=f"q_lens asks for 4 tokens of sequence {b}, which has 3;"):
        cache.batch([a, b], [1, 4])
    with pytest.raises(ArgumentError, match=f"seq is {b + 1}, which this cache never made; there are 2 sequences"):
        cache.append(b + 1, 1)
    cache.free(a)
    with pytest.raises(ArgumentError, match=f"seq is {a}, which was freed"):
        cache.append(a, 1)
    with pytest.raises(ArgumentError, match=r"num_tokens is 1\.5; it must be a whole number"):
        cache.append(b, 1.5)  # type: ignore[arg-type]
    assert (cache.length(b), cache.blocks_used) == (3, 1)


def test_rows_of_another_layer_are_refused_before_anything_is_written() -> None:
    cache = nan_cache(GQA, 4, 4)
    slots, before = cache.append(cache.new_sequence(), 2), snapshot(cache)
    with pytest.raises(ArgumentError, match="value"):
        cache.layers[0].write(slots, torch.zeros(2, 2, 3), torch.zeros(2, 2, 4))
    assert all(map(torch.equal, snapshot(cache), before))


def test_pages_are_views_of_one_tensor_where_the_layout_says_so() -> None:
    """Engines and vendor kernels rely on these strides."""
    keys, values = PagedCache(GQA, 3, 4, torch.float32, layout="interleaved").layers[0].caches
    assert values.data_ptr() - keys.data_ptr() == 4 * 2 * 3 * 4
    assert keys.stride() == values.stride() == (2 * 4 * 2 * 3, 2 * 3, 3, 1)
    ckv, kpe = PagedCache(MLA, 3, 4, torch.float32, layout="interleaved").layers[0].caches
    assert kpe.data_ptr() - ckv.data_ptr() == 6 * 4
    assert ckv.stride() == kpe.stride() == (4 * 8, 8, 1)
    assert PagedCache(GQA, 3, 4, torch.float32, layout="HND").layers[0].caches[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("layer", [-1, 2])
def test_refuses_a_layer_that_is_none(layer: int) -> None:
    cache = PagedCache([GqaLayer(2, 8)] * 2, 4, 4, torch.float32)
    seq = cache.new_sequence()
    cache.append(seq, 1)
    for call in (lambda: cache.read(layer, seq), lambda: cache.attend(layer, torch.zeros(1, 2, 8), [seq], [1], 1.0)):
        with pytest.raises(ArgumentError, match=f"layer is {layer}; the cache has 2: pass an index from 0"):
            call()
