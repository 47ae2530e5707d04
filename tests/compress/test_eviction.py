"""Eviction policies against slow oracles that follow the published definitions, and what the cache does for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvbackend
from kvbackend import ArgumentError, ops
from kvbackend.cache import GqaLayer, MlaLayer, OutOfBlocks, PagedCache
from kvbackend.compress import H2O, TOVA, EvictingCache, L2Norm, Policy, PyramidKV, SlidingWindow, SnapKV, StreamingLLM
from tests.golden import wave

SCALE = 0.5


@pytest.fixture(scope="module", autouse=True)
def _reference() -> Iterator[None]:
    """What is kept is under test here, not who computes it."""
    with kvbackend.use("reference"):
        yield


@dataclass
class Text:
    """Random queries, keys and values of one sequence in every layer, and what a cache made of them."""

    kept: EvictingCache
    heads: int = 4
    seed: int = 0
    seq: int = -1
    q: list[Tensor] = field(default_factory=list)  # of each layer [T, H, D]
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    out: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(self.seed)
        self.seq = self.kept.new_sequence()
        for layer in range(self.kept.num_layers):
            spec = self.kept.cache.specs[layer % len(self.kept.cache.specs)]
            assert isinstance(spec, GqaLayer)
            self.q.append(torch.empty(0, self.heads, spec.head_dim))
            self.k.append(torch.empty(0, spec.kv_heads, spec.head_dim))
            self.v.append(torch.empty(0, spec.kv_heads, spec.value_width))
            self.out.append([])

    def feed(self, count: int, evict: bool = True, rows: dict[str, Tensor] | None = None) -> int:
        """Append tokens, attend and evict, as a model would; blocks freed."""
        slots = self.kept.append([self.seq], [count])
        for layer in range(self.kept.num_layers):
            new = {name: torch.randn(count, *rows_of[layer].shape[1:], generator=self.draw) for name, rows_of in
                   (("q", self.q), ("k", self.k), ("v", self.v))} | (rows or {})  # fmt: skip
            for name, tensor in new.items():
                getattr(self, name)[layer] = torch.cat((getattr(self, name)[layer], tensor.float()))
            pages = self.kept.pages(layer)
            pages.write(slots[layer], new["k"].float(), new["v"].float())
            self.out[layer].append(self.attend(layer, new["q"].float()))
            self.kept.observe(layer, [self.seq], [count], new["q"].float(), SCALE)
        return self.kept.evict([self.seq]) if evict else 0

    def attend(self, layer: int, q: Tensor, **other: Any) -> Tensor:
        batch = self.kept.batch(layer, [self.seq], [len(q)])
        out, _ = ops.paged_attention(q, **self.kept.pages(layer).arguments, **batch, softmax_scale=SCALE, **other)
        return out

    def positions(self, layer: int = 0) -> list[list[int]]:
        """Kept positions of each kv head."""
        heads = self.k[layer].shape[1]
        return self.kept.kept(self.seq, layer).expand(heads, -1).tolist()


def cache_of(layers: int = 2, blocks: int = 40, block_size: int = 3, kv_heads: int = 2, dim: int = 4) -> PagedCache:
    cache = PagedCache([GqaLayer(kv_heads, dim, dim + 1)] * layers, blocks, block_size, torch.float32)
    for pages in cache.layers:
        for tensor in pages.caches:
            tensor.fill_(torch.nan)
    return cache


def probabilities(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Softmax of one query over keys [n, D]."""
    logits = SCALE * keys @ q
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def best(scores: dict[int, float], count: int) -> list[int]:
    """The positions of the highest scores, the lowest position of equals."""
    return sorted(sorted(scores, key=lambda position: (-scores[position], position))[:count])


class Oracle:
    """One layer of one sequence, a set of positions for each kv head, step by step as the definitions read."""

    def __init__(self, policy: Policy, kv_heads: int, group: int) -> None:
        self.policy, self.group = policy, group
        self.sets = [list[int]() for _ in range(kv_heads)]
        self.sums: list[dict[int, float]] = [{} for _ in range(kv_heads)]
        self.q, self.k = np.zeros((0, kv_heads * group, 1)), np.zeros((0, kv_heads, 1))
        self.prompt, self.done = 0, False

    def mass(self, i: int, h: int) -> dict[int, float]:
        """What query i pays, a mean over the query heads of kv head h, to each position it sees."""
        seen = [j for j in self.sets[h] if j <= i]
        rows = [probabilities(self.q[i, h * self.group + g], self.k[seen, h]) for g in range(self.group)]
        return dict(zip(seen, np.mean(rows, 0), strict=True))

    def step(self, q: np.ndarray, k: np.ndarray) -> None:
        start = len(self.q)
        self.q = q if start == 0 else np.concatenate((self.q, q))
        self.k = k if start == 0 else np.concatenate((self.k, k))
        total = len(self.q)
        for h in range(len(self.sets)):
            self.sets[h] += range(start, total)
            for i in range(start, total):
                for j, p in self.mass(i, h).items():
                    self.sums[h][j] = self.sums[h].get(j, 0.0) + p
        if self.done:
            return
        self.prompt = self.prompt or total
        self.done = self.policy.once
        assert not isinstance(self.policy.budget, (list, tuple))
        budget = self.policy.budget if isinstance(self.policy.budget, int) else int(self.policy.budget * self.prompt)
        if len(self.sets[0]) > budget:
            scores = [self.scores(h) for h in range(len(self.sets))]
            if not self.policy.by_head:
                mean = {j: float(np.mean([s[j] for s in scores])) for j in scores[0]}
                scores = [mean] * len(scores)
            self.sets = [self.keep(rows, s, budget) for rows, s in zip(self.sets, scores, strict=True)]
            self.sums = [{j: s[j] for j in rows} for rows, s in zip(self.sets, self.sums, strict=True)]

    def scores(self, h: int) -> dict[int, float]:
        rows, total, policy = self.sets[h], len(self.q), self.policy
        if isinstance(policy, H2O):
            return dict(self.sums[h])
        if isinstance(policy, TOVA):
            return self.mass(total - 1, h)
        if isinstance(policy, L2Norm):
            return {j: -float(np.linalg.norm(self.k[j, h])) for j in rows}
        if isinstance(policy, SnapKV):
            window = policy.observed
            earlier = rows[: total - window]
            masses = [self.mass(i, h) for i in range(total - window, total)]
            raw = {j: sum(mass.get(j, 0.0) for mass in masses) for j in earlier}
            half, out = policy.kernel // 2, {}
            for j in earlier:  # the prompt is whole, so rows are positions
                near = [raw[i] for i in range(j - half, j + half + 1) if i in raw]
                out[j] = sum(near) if policy.pool == "avg" else max(near) if policy.pool == "max" else raw[j]
            return out | dict.fromkeys(rows[total - window :], 0.0)
        return dict.fromkeys(rows, 0.0)

    def keep(self, rows: list[int], scores: dict[int, float], budget: int) -> list[int]:
        first, last = self.policy.forced(budget)
        forced = rows[:first] + rows[len(rows) - last :]
        left = {j: scores[j] for j in rows if j not in forced}
        return sorted(set(forced) | set(best(left, budget - len(set(forced)))))


POLICIES = [
    StreamingLLM(9, sinks=2, positions="original"),
    StreamingLLM(0.5, sinks=1, positions="original"),
    SlidingWindow(7),
    H2O(8),
    H2O(0.4, recent=2),
    H2O(8, recent=3, per_head=False),
    TOVA(8),
    TOVA(6, recent=1, per_head=True),
    SnapKV(8, observed=3, kernel=3),
    SnapKV(0.6, observed=2, kernel=5, pool="max"),
    SnapKV(7, observed=4, kernel=1, pool="none", per_head=False),
    L2Norm(6),
    L2Norm(8, sinks=1, recent=2, per_head=False),
]


# ------------------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**6), st.integers(12, 20), st.lists(st.integers(1, 4), max_size=5))
def test_kept_positions_are_those_of_the_published_definition(
    policy: Policy, seed: int, prompt: int, steps: list[int]
) -> None:
    text = Text(EvictingCache(cache_of(), policy), seed=seed)
    oracles = [Oracle(policy, 2, 2) for _ in range(2)]
    for count in [prompt, *steps]:
        text.feed(count)
        for layer, oracle in enumerate(oracles):
            oracle.step(text.q[layer][-count:].double().numpy(), text.k[layer][-count:].double().numpy())
            assert text.positions(layer) == oracle.sets
            keys, values = text.kept.cache.read(layer, text.kept._state(text.seq).tables[0])
            for h, rows in enumerate(oracle.sets):
                assert torch.equal(keys[:, h], text.k[layer][rows, h]), "rows are copies"
                assert torch.equal(values[:, h], text.v[layer][rows, h])


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_attention_after_eviction_is_masked_attention_over_the_whole(policy: Policy) -> None:
    text = Text(EvictingCache(cache_of(), policy), seed=5)
    text.feed(17)
    for count in (1, 3):  # a decode step and a chunk
        before = [text.positions(layer) for layer in range(2)]
        start = len(text.q[0])
        text.feed(count)
        for layer in range(2):
            for i in range(count):
                for h in range(4):
                    seen = [*before[layer][h // 2], *range(start, start + i + 1)]
                    weights = probabilities(
                        text.q[layer][start + i, h].double().numpy(), text.k[layer][seen, h // 2].double().numpy()
                    )
                    want = weights @ text.v[layer][seen, h // 2].double().numpy()
                    np.testing.assert_allclose(text.out[layer][-1][i, h], want, rtol=0, atol=2e-6)


def test_snapkv_and_h2o_golden_sets() -> None:
    """q = wave(30, 1, 12, 4), k = wave(31, 1, 12, 4), a window of 3 and three more: {1, 2, 3}; H2O {0, 1, 2}."""
    rows = {"q": wave(30, 12, 1, 4), "k": wave(31, 12, 1, 4), "v": wave(32, 12, 1, 5)}
    for policy, want in [
        (SnapKV(6, observed=3, kernel=3), [1, 2, 3, 9, 10, 11]),
        (H2O(6, recent=3), [0, 1, 2, 9, 10, 11]),
        (StreamingLLM(6, sinks=2), [0, 1, 8, 9, 10, 11]),
        (SlidingWindow(6), [6, 7, 8, 9, 10, 11]),
    ]:
        text = Text(EvictingCache(cache_of(1, kv_heads=1), policy), heads=1)
        text.feed(12, rows=rows)
        assert text.positions() == [want], policy


def test_pyramid_golden_budgets() -> None:
    budgets = [PyramidKV(2048).tokens(8192, layer, 32) for layer in range(32)]
    assert [budget - 32 for budget in (budgets[0], budgets[1], budgets[-1])] == [3932, 3809, 119]
    assert sum(budgets) / 32 == 2057.5
    small = [PyramidKV(128, observed=8).tokens(8192, layer, 32) - 8 for layer in range(32)]
    assert (small[0], small[1], small[-1]) == (234, 227, 17)
    # a short prompt leaves the lowest layer no more than there is, and the highest gets what is left over
    tight = [PyramidKV(128, observed=8).tokens(241, layer, 8) - 8 for layer in range(8)]
    assert tight == [233 - layer * ((233 - 7) // 7) for layer in range(8)]
    assert {PyramidKV(128, observed=8).tokens(239, layer, 8) for layer in range(8)} == {128}, "uniform"
    assert PyramidKV(100, observed=90).tokens(50, 3, 8) == 100, "under the average all are kept"


def test_pyramid_keeps_more_in_lower_layers_and_frees_more_of_the_others() -> None:
    cache = cache_of(1, blocks=60)
    text = Text(EvictingCache(cache, PyramidKV(8, observed=2, kernel=3, beta=3), num_layers=4), seed=3)
    assert text.feed(24) > 0
    budgets = [12, 10, 8, 6]  # W + 2 (8 - 2) - 2 falling by (10 - 2) // 3 to W + 4
    assert [text.kept.rows(text.seq, layer) for layer in range(4)] == budgets
    assert cache.blocks_used == sum(-(-rows // 3) for rows in budgets)
    for layer, budget in enumerate(budgets):
        oracle = Oracle(SnapKV(budget, observed=2, kernel=3), 2, 2)
        oracle.step(text.q[layer].double().numpy(), text.k[layer].double().numpy())
        assert text.positions(layer) == oracle.sets


def test_budgets_of_each_layer() -> None:
    policy = H2O([12, 0.25])
    text = Text(EvictingCache(cache_of(1), policy, num_layers=4))
    text.feed(24)
    assert [text.kept.rows(text.seq, layer) for layer in range(4)] == [12, 12, 6, 6]


def test_streaming_llm_turns_keys_by_their_row_in_the_cache() -> None:
    """Keys are cached before RoPE; distances are those of rows, as in the published code."""
    angle = torch.arange(40)[:, None] * torch.tensor([1.0, 0.1])
    table = torch.cat((angle.cos(), angle.sin()), -1)

    def turn(x: Tensor, position: int) -> Tensor:
        cos, sin = table[position, :2], table[position, 2:]
        return torch.cat((x[:2] * cos - x[2:] * sin, x[:2] * sin + x[2:] * cos))

    text = Text(EvictingCache(cache_of(1), StreamingLLM(6, sinks=2)))
    text.feed(15)
    text.feed(1, evict=False)
    (position,) = text.kept.positions([text.seq], [1]).tolist()
    assert position == 6
    q = text.q[0][-1:]
    turned = torch.stack([turn(head, position) for head in q[0]])[None]
    got = text.attend(0, turned, rope_cos_sin=table)
    rows = [0, 1, 11, 12, 13, 14, 15]
    for h in range(4):
        keys = torch.stack([turn(text.k[0][j, h // 2], row) for row, j in enumerate(rows)])
        want = probabilities(turned[0, h].double().numpy(), keys.double().numpy()) @ text.v[0][rows, h // 2].numpy()
        np.testing.assert_allclose(got[0, h], want, rtol=0, atol=2e-6)


def test_positions_are_those_of_the_text_under_other_policies() -> None:
    text = Text(EvictingCache(cache_of(1), SlidingWindow(6)))
    text.feed(15)
    text.feed(2, evict=False)
    assert text.kept.positions([text.seq], [2]).tolist() == [15, 16]
    # a window of 4 at attention is told by positions, not rows
    got = text.attend(0, text.q[0][-2:], window=4)
    for i, position in enumerate((15, 16)):
        seen = list(range(position - 3, position + 1))
        keys, values = text.k[0][seen, 0].double().numpy(), text.v[0][seen, 0].double().numpy()
        want = probabilities(text.q[0][position, 0].double().numpy(), keys) @ values
        np.testing.assert_allclose(got[i, 0], want, rtol=0, atol=2e-6)


# --------------------------------------------------------------------------------------------------------- memory


def test_memory_falls_and_others_get_it() -> None:
    cache = cache_of(2, blocks=10)
    kept = EvictingCache(cache, SnapKV(6, observed=2))
    text = Text(kept)
    assert text.feed(27, evict=False) == 0
    assert (cache.blocks_used, cache.blocks_free) == (9, 1)
    bytes_before = kept.used_bytes
    with pytest.raises(OutOfBlocks):
        kept.append([kept.new_sequence()], [20])
    assert kept.evict() == 7
    assert (cache.blocks_used, cache.blocks_free) == (2, 8)
    # 2 layers of 2 heads with keys of 4 and values of 5 floats, and positions per head and for attention
    per_token = 2 * 2 * (4 + 5) * 4 + 2 * (2 + 1) * 4
    assert (bytes_before, kept.used_bytes) == (27 * per_token, 6 * per_token)
    assert cache.used_bytes == 6 * cache.bytes_per_token
    other = Text(kept, seed=9)
    other.feed(20)
    assert text.kept.rows(text.seq) == 6
    keys, _ = cache.read(1, kept._state(text.seq).tables[0])
    assert torch.equal(keys[-1], text.k[1][-1]), "another sequence in the freed blocks changes nothing"


def test_a_long_text_stays_within_its_budget() -> None:
    cache = cache_of(1, blocks=5)
    text = Text(EvictingCache(cache, StreamingLLM(8, sinks=2), slack=4))
    text.feed(8)
    lengths = set()
    for _ in range(40):
        text.feed(1)
        lengths.add(text.kept.rows(text.seq))
    assert lengths == set(range(8, 13)), "slack: from the budget to 4 more"
    assert text.kept.tokens(text.seq) == 48
    assert cache.pool.peak <= 5


def test_once_means_once() -> None:
    text = Text(EvictingCache(cache_of(1), SnapKV(6, observed=2)))
    text.feed(12)
    text.feed(9)
    assert text.kept.rows(text.seq) == 15


def test_prompts_in_chunks_choose_as_in_one() -> None:
    whole, parts = (Text(EvictingCache(cache_of(1), SnapKV(6, observed=5)), seed=4) for _ in range(2))
    draw = torch.Generator().manual_seed(1)
    rows = {"q": torch.randn(20, 4, 4, generator=draw), "k": torch.randn(20, 2, 4, generator=draw)}
    rows["v"] = torch.randn(20, 2, 5, generator=draw)
    whole.feed(20, rows=rows)
    for start, end in [(0, 9), (9, 17), (17, 20)]:
        parts.feed(end - start, evict=end == 20, rows={name: tensor[start:end] for name, tensor in rows.items()})
    assert whole.positions() == parts.positions()


# ---------------------------------------------------------------------------------------------------------- forks


def test_forks_refuse_eviction_by_their_own_queries() -> None:
    for policy in (H2O(6), SnapKV(6, observed=2), TOVA(6)):
        text = Text(EvictingCache(cache_of(1), policy))
        text.feed(12, evict=False)
        child = text.kept.fork(text.seq)
        before = text.kept.cache.layers[0].key_cache.clone()
        with pytest.raises(
            ArgumentError, match=r"sequence 0 shares 4 of its blocks with forks; .* evict before forking"
        ):
            text.kept.evict()
        torch.testing.assert_close(text.kept.cache.layers[0].key_cache, before, rtol=0, atol=0, equal_nan=True)
        assert text.kept.rows(text.seq) == text.kept.rows(child) == 12
        text.kept.free(child)
        assert text.kept.evict() == 2, "alone it may"


def test_forks_evict_by_position_into_blocks_of_their_own() -> None:
    cache = cache_of(1, blocks=8)
    text = Text(EvictingCache(cache, SlidingWindow(5)))
    text.feed(12, evict=False)
    child = text.kept.fork(text.seq)
    text.kept.evict([child])
    assert text.kept.kept(child).tolist() == [[7, 8, 9, 10, 11]]
    assert text.kept.kept(text.seq).tolist() == [list(range(12))], "the parent keeps all"
    keys, values = cache.read(0, text.kept._state(child).tables[0])
    assert torch.equal(keys, text.k[0][7:])
    assert torch.equal(values, text.v[0][7:])
    assert torch.equal(cache.read(0, text.kept._state(text.seq).tables[0])[0], text.k[0])
    assert cache.blocks_used == 4 + 2
    grandchild = text.kept.fork(text.seq)
    text.kept.append([grandchild], [6])  # two new blocks: the pool is full
    with pytest.raises(OutOfBlocks):
        text.kept.evict([grandchild])
    assert text.kept.rows(grandchild) == 18


def test_a_fork_goes_on_with_its_parents_positions() -> None:
    text = Text(EvictingCache(cache_of(1), H2O(7)))
    text.feed(13)
    kept = text.positions()
    child = text.kept.fork(text.seq)
    text.kept.append([text.seq], [1])  # the last block is shared and not full: one of them gets a copy
    text.kept.append([child], [2])
    assert text.kept.kept(text.seq).tolist() == [[*rows, 13] for rows in kept]
    assert text.kept.kept(child).tolist() == [[*rows, 13, 14] for rows in kept]
    assert text.kept.tokens(child) == 15


# ------------------------------------------------------------------------------------------------------ summaries


def similar_tokens(count: int) -> dict[str, Tensor]:
    """Keys and values around one mean each, but for the last 50; queries that look at the common ones."""
    draw = torch.Generator().manual_seed(11)
    centre = torch.randn(1, 1, 8, generator=draw)
    keys = centre + 0.1 * torch.randn(count, 1, 8, generator=draw)
    values = torch.ones(count, 1, 9) + 0.1 * torch.randn(count, 1, 9, generator=draw)
    keys[-50:] = torch.randn(50, 1, 8, generator=draw)
    values[-50:] = torch.randn(50, 1, 9, generator=draw)
    return {"q": 0.3 * torch.randn(count, 2, 8, generator=draw), "k": keys, "v": values}


def test_a_summary_with_mass_correction_stands_for_what_was_evicted() -> None:
    """150 of 200 similar tokens in one row: dropped or unweighted they are missed, with ln(n) they are nearly there."""
    rows = similar_tokens(200)

    def after(policy: Policy, slots: int) -> Text:
        cache = PagedCache([GqaLayer(1, 8, 9)], 60, 4, torch.float32)
        text = Text(EvictingCache(cache, policy, summary_slots=slots), heads=2)
        text.feed(200, rows=rows)
        return text

    q = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(2))
    whole = after(SlidingWindow(200), 0).attend(0, q)

    def error(text: Text, **other: Any) -> float:
        batch = text.kept.batch(0, [text.seq], [1]) | other
        out, _ = ops.paged_attention(q, *text.kept.pages(0).caches, **batch, softmax_scale=SCALE)
        return float((out - whole).norm() / whole.norm())

    dropped, summed = after(SlidingWindow(50), 0), after(SlidingWindow(51), 1)
    assert summed.kept.rows(summed.seq) == 51
    assert summed.positions() == [[149, *range(150, 200)]]
    plain = error(summed, key_bias=None)
    assert error(summed) < 0.03
    assert error(summed) < 0.2 * plain < 0.2 * error(dropped)


@pytest.mark.parametrize(
    "policy", [H2O(9), H2O(9, per_head=False), TOVA(9), SlidingWindow(9), StreamingLLM(9, sinks=1), L2Norm(9)], ids=repr
)
def test_summaries_are_exact_means_with_the_log_of_their_count(policy: Policy) -> None:
    text = Text(EvictingCache(cache_of(2), policy, summary_slots=3), seed=8)
    text.feed(21)
    for layer in range(2):
        keys, values = text.kept.cache.read(layer, text.kept._state(text.seq).tables[0])
        batch = text.kept.batch(layer, [text.seq], [0])
        bias = batch["key_bias"][batch["block_table"][0].long()].flatten(0, 1)[:9]
        for h, rows in enumerate(text.positions(layer)):
            assert rows == sorted(rows)
            summaries = [i for i, size in enumerate(bias[:, h].tolist()) if size > 0]
            tokens = [position for i, position in enumerate(rows) if i not in summaries]
            assert (len(summaries), len(tokens)) == (3, 6)
            gone = sorted(set(range(21)) - set(tokens))
            for number, i in enumerate(summaries):
                part = gone[number * 5 : number * 5 + 5]
                assert rows[i] == part[-1]
                torch.testing.assert_close(bias[i, h], torch.tensor(5.0).log())
                torch.testing.assert_close(keys[i, h], text.k[layer][part, h].mean(0))
                torch.testing.assert_close(values[i, h], text.v[layer][part, h].mean(0))


@pytest.mark.parametrize("policy", [H2O(9), TOVA(9), SlidingWindow(9)], ids=repr)
def test_no_token_is_lost_from_summaries_over_many_evictions(policy: Policy) -> None:
    """Counts add up to the text, and mean rows weighted by them to the sum of all rows."""
    text = Text(EvictingCache(cache_of(1), policy, summary_slots=2), seed=2)
    for count in (14, 1, 1, 3, 1, 7):
        text.feed(count)
        batch = text.kept.batch(0, [text.seq], [0])
        sizes = batch["key_bias"][batch["block_table"][0].long()].flatten(0, 1)[:9].exp()
        keys, values = text.kept.cache.read(0, text.kept._state(text.seq).tables[0])
        torch.testing.assert_close(sizes.sum(0), torch.full((2,), float(text.kept.tokens(text.seq))))
        torch.testing.assert_close((sizes[..., None] * keys).sum(0), text.k[0].sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close((sizes[..., None] * values).sum(0), text.v[0].sum(0), rtol=1e-4, atol=1e-4)


def test_blocks_that_held_a_summary_forget_it() -> None:
    kept = EvictingCache(cache_of(1, blocks=4, block_size=3), SlidingWindow(3), summary_slots=2)
    first = Text(kept)
    first.feed(12)
    kept.free(first.seq)
    second = Text(kept)
    second.feed(12, evict=False)
    batch = kept.batch(0, [second.seq], [0])
    assert (batch["key_bias"][batch["block_table"][0].long()] == 0).all()


def test_equal_tokens_summed_up_change_nothing() -> None:
    """n equal keys and one with ln(n) are the same to softmax."""
    key, value = wave(1, 1, 2, 4), wave(2, 1, 2, 5)
    rows = {"q": wave(3, 15, 4, 4), "k": key.expand(15, -1, -1).clone(), "v": value.expand(15, -1, -1).clone()}
    rows["k"][11:], rows["v"][11:] = wave(5, 4, 2, 4), wave(6, 4, 2, 5)
    cut = Text(EvictingCache(cache_of(1), SlidingWindow(6), summary_slots=2))
    cut.feed(15, rows=rows)
    whole = Text(EvictingCache(cache_of(1), SlidingWindow(15)))
    whole.feed(15, rows=rows)
    q = wave(7, 1, 4, 4).float()
    torch.testing.assert_close(cut.attend(0, q), whole.attend(0, q), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2O(0), "budget is 0 tokens; it must be 1 or more: pass"),
        (lambda: H2O(0.0), "budget is 0.0; a float is the share .* above 0 and at most 1: pass"),
        (lambda: H2O(1.5), "budget is 1.5; a float is the share"),
        (lambda: H2O(float("nan")), "budget is nan; a float"),
        (lambda: H2O("16"), "budget is '16'; it must be a number"),
        (lambda: H2O(True), "budget is True; it must be a number"),
        (lambda: H2O([]), "budget is empty"),
        (
            lambda: H2O(4, recent=5),
            "budget is 4 tokens; H2O always keeps 5 recent tokens, so it must be at least 5: raise",
        ),
        (lambda: SnapKV(31), "budget is 31 tokens; SnapKV always keeps 32 recent tokens"),
        (lambda: StreamingLLM(4), "budget is 4 tokens; StreamingLLM always keeps 4 sinks and 1 recent tokens"),
        (lambda: StreamingLLM(8, positions="text"), "positions is 'text'; it must be 'cache' or 'original'"),
        (lambda: StreamingLLM(8, sinks=-1), "sinks is -1; it must be 0 or more"),
        (lambda: SnapKV(64, kernel=4), "kernel is 4; it must be odd"),
        (lambda: SnapKV(64, pool="mean"), "pool is 'mean'; it must be"),
        (lambda: PyramidKV([64, 32]), "budget has 2 entries; PyramidKV derives a budget for each layer"),
        (lambda: PyramidKV(64, beta=0), "beta is 0; it must be 1 or more"),
        (lambda: EvictingCache(cache_of(2), PyramidKV(64)), "PyramidKV gives layers budgets .* share one block table"),
        (
            lambda: EvictingCache(cache_of(2), H2O([8, 9])),
            "H2O gives layers budgets of their own.* one layer and num_layers=2",
        ),
        (lambda: EvictingCache(cache_of(1), H2O([8, 9]), num_layers=3), "budget has 2 entries for 3 layers"),
        (lambda: EvictingCache(cache_of(2), H2O(8), num_layers=3), "num_layers is 3 but cache has 2 layers"),
        (
            lambda: EvictingCache(cache_of(), SlidingWindow(3), summary_slots=3),
            "3 summary slots, so it must be at least 4",
        ),
        (lambda: EvictingCache(cache_of(), H2O(8), slack=-1), "slack is -1; it must be 0 or more"),
    ],
)
def test_wrong_policies_are_refused_when_made(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_mla_is_evicted_by_position_only() -> None:
    cache = PagedCache([MlaLayer(6, 2)] * 2, 12, 2, torch.float32)
    for policy, slots in [(H2O(8), 0), (L2Norm(8), 0), (SlidingWindow(8), 2)]:
        with pytest.raises(ArgumentError, match="cache has MlaLayers, whose rows are latent"):
            EvictingCache(cache, policy, summary_slots=slots)
    with pytest.raises(ArgumentError, match="positions='cache' turns them at read: pass positions='original'"):
        EvictingCache(cache, StreamingLLM(8))
    kept = EvictingCache(cache, StreamingLLM(6, sinks=2, positions="original"))
    seq = kept.new_sequence()
    slots = kept.append([seq], [11])
    ckv, kpe = wave(1, 11, 6).float(), wave(2, 11, 2).float()
    for layer in range(2):
        kept.pages(layer).write(slots[layer], ckv + layer, kpe)
    assert kept.evict() == 3
    rows = [0, 1, 7, 8, 9, 10]
    assert torch.equal(cache.read(1, kept._state(seq).tables[0])[0], ckv[rows] + 1)
    assert torch.equal(cache.read(1, kept._state(seq).tables[0])[1], kpe[rows])
    assert set(kept.batch(0, [seq], [1])) == {"block_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q"}


def unchanged(text: Text, message: str) -> None:
    """evict refuses, and every page stays as it is."""
    cache = text.kept.cache
    before = [tensor.clone() for pages in cache.layers for tensor in pages.caches]
    used = cache.blocks_used
    with pytest.raises(ArgumentError, match=message):
        text.kept.evict()
    after = [tensor for pages in cache.layers for tensor in pages.caches]
    for was, now in zip(before, after, strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)
    assert cache.blocks_used == used


def test_nan_scores_are_refused_before_any_write() -> None:
    for policy in (H2O(6), SnapKV(6, observed=2), TOVA(6), L2Norm(6)):
        text = Text(EvictingCache(cache_of(2), policy))
        text.feed(11, evict=False)
        rows = {name: torch.full((1, *rows[1].shape[1:]), torch.nan) for name, rows in (("q", text.q), ("k", text.k))}
        text.feed(1, evict=False, rows=rows)
        unchanged(text, "scores of layer 0 hold NaN; all must be finite .*: look for NaN")


def test_a_share_too_small_for_what_is_always_kept_is_refused_before_any_write() -> None:
    text = Text(EvictingCache(cache_of(1), SnapKV(0.25, observed=4)))
    text.feed(12, evict=False)
    unchanged(text, "budget is 3 tokens; SnapKV always keeps 4 recent tokens, so it must be at least 4")


def test_one_bad_sequence_leaves_the_others_alone() -> None:
    kept = EvictingCache(cache_of(1), H2O(6))
    good, bad = Text(kept), Text(kept)
    good.feed(12, evict=False)
    bad.feed(12, evict=False)
    kept.append([bad.seq], [1])
    unchanged(good, "layer 0 observed 12 queries, the last at token 12 of 13; H2O chooses by all 13: call observe")
    assert kept.evict([good.seq]) == 2


def test_a_window_cannot_be_told_where_heads_keep_other_tokens() -> None:
    text = Text(EvictingCache(cache_of(1), H2O(6)))
    text.feed(3)
    with pytest.raises(ArgumentError, match="window is 4 and H2O keeps other tokens in each kv head"):
        text.kept.observe(0, [text.seq], [1], text.q[0][-1:], SCALE, window=4)


def test_unknown_sequences_and_layers() -> None:
    kept = EvictingCache(cache_of(1), H2O(6))
    with pytest.raises(ArgumentError, match="seq is 7, which this object does not hold"):
        kept.append([7], [1])
    with pytest.raises(ArgumentError, match="layer is 1; there are 1"):
        kept.batch(1, [], [])
    seq = kept.new_sequence()
    assert kept.evict() == 0, "an empty sequence has nothing to evict"
    kept.free(seq)
    assert kept.cache.blocks_used == 0
