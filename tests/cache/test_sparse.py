"""SparseAttention against a slow oracle that follows its definition, and what caches and sequences do to choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbackend
from kvbackend import ArgumentError
from kvbackend.cache import GqaLayer, MlaLayer, PagedCache, SparseAttention, Sparsity
from kvbackend.cache.stages import STAGES, advice

from .rows import nan_cache

LAYER = GqaLayer(2, 32)
HEADS, SCALE = 4, 0.4


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    """What is chosen is under test here, not who computes it."""
    with kvbackend.use("reference"):
        yield


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, heads, 32, generator=draw) for heads in (HEADS, 2, 2))  # type: ignore[return-value]


def made(sparsity: Sparsity, block_size: int = 16, num_layers: int = 1, **options: Any) -> SparseAttention:
    cache_options = {name: options.pop(name) for name in ("kv_format", "layout") if name in options}
    cache = nan_cache((LAYER,) * num_layers, 1280 // block_size, block_size, **cache_options)
    return SparseAttention(cache, sparsity, **options)


def feed(sparse: SparseAttention, seq: int, key: Tensor, value: Tensor, layer: int = 0, append: bool = True) -> None:
    slots = sparse.cache.append(seq, len(key)) if append else None
    assert slots is not None
    sparse.write(layer, [seq], [len(key)], slots, key, value)


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(sorted(np.flatnonzero(scores > -np.inf), key=lambda i: (-scores[i], i))[:count])


def recent_from(sparsity: Sparsity, length: int) -> int:
    return max(length - sparsity.recent, 0) // sparsity.page_size * sparsity.page_size


def oracle_choice(sparsity: Sparsity, q: np.ndarray, keys: np.ndarray, length: int) -> list[int]:
    """Positions that one kv head's query heads q [G, D] choose among keys [n, D], of which `length` are visible."""
    size, end = sparsity.page_size, recent_from(sparsity, length)
    assert isinstance(sparsity.topk, int)
    pages = -(-len(keys) // size)
    bound = np.full(pages, -np.inf)
    for page in range(pages):
        inside = keys[page * size : (page + 1) * size]
        if page * size < end and (page + 1) * size > sparsity.sinks:
            low, high = inside.min(0), inside.max(0)
            bound[page] = max(np.maximum(one * low, one * high).sum() for one in q)
    chosen = best(bound, -(-sparsity.candidates * sparsity.topk // size))
    scores = np.full(len(keys), -np.inf)
    for page in chosen:
        for token in range(max(page * size, sparsity.sinks), min((page + 1) * size, end)):
            scores[token] = max(one @ keys[token] for one in q)
    return best(scores, sparsity.topk)


def oracle(sparsity: Sparsity, q: Tensor, keys: Tensor, values: Tensor, length: int) -> np.ndarray:
    """Output [H, D] of one query at position length - 1."""
    out = []
    for head in range(2):
        k, v = keys[:, head].double().numpy(), values[:, head].double().numpy()
        group = q.unflatten(0, (2, -1))[head].double().numpy()
        chosen = oracle_choice(sparsity, group, k, length)
        seen = sorted({*range(min(sparsity.sinks, length)), *chosen, *range(recent_from(sparsity, length), length)})
        for one in group:
            logits = k[seen] @ one * SCALE
            weights = np.exp(logits - logits.max())
            out.append(weights @ v[seen] / weights.sum())
    return np.stack(out)


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("page_size", [1, 8, 16, 128])
@pytest.mark.parametrize("candidates", [1, 3])
def test_a_choice_follows_the_definition_at_any_page_and_block_size(
    block_size: int, page_size: int, candidates: int
) -> None:
    sparsity = Sparsity(24, sinks=3, recent=10, page_size=page_size, candidates=candidates)
    sparse = made(sparsity, block_size)
    q, keys, values = rows(300)
    seq = sparse.cache.new_sequence()
    start = 0
    for count in (200, 93, 7):  # a prompt, a chunk, and what a draft model proposed
        feed(sparse, seq, keys[start : start + count], values[start : start + count])
        start += count
        out, _ = sparse.attend(0, q[start - 5 : start], [seq], [5], SCALE)
        for i, got in enumerate(out, start - 5):
            want = oracle(sparsity, q[i], keys[:start], values[:start], i + 1)
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)
    feed(sparse, seq, keys[:1], values[:1])
    sparse.attend(0, q[:1], [seq], [1], SCALE)
    every = torch.cat((keys, keys[:1])).double().numpy()
    for head, got in enumerate(sparse.chosen(0, seq).tolist()):
        group = q[0].unflatten(0, (2, -1))[head].double().numpy()
        assert [position for position in got if position >= 0] == oracle_choice(sparsity, group, every[:, head], 301)


@pytest.mark.parametrize("summaries", [False, True])
def test_choosing_everything_is_dense_attention(summaries: bool) -> None:
    sparse = made(Sparsity(286, sinks=3, recent=10, candidates=2, summaries=summaries))
    q, keys, values = rows(300)
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys, values)
    out, lse = sparse.attend(0, q[-6:], [seq], [6], SCALE, return_lse=True)
    want, want_lse = sparse.cache.attend(0, q[-6:], [seq], [6], SCALE, return_lse=True)
    torch.testing.assert_close(out[:-1], want[:-1], rtol=1e-5, atol=1e-5)  # 287 tokens in the middle of the last query
    torch.testing.assert_close(lse[:-1], want_lse[:-1], rtol=1e-5, atol=1e-5)


def test_one_open_page_is_read_whole() -> None:
    sparse = made(Sparsity(8, sinks=0, recent=4, page_size=128))
    q, keys, values = rows(60)
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys, values)
    got, want = (where.attend(0, q[-3:], [seq], [3], SCALE)[0] for where in (sparse, sparse.cache))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_dense_below_and_short_contexts_are_dense() -> None:
    q, keys, values = rows(120)
    for sparsity, below in ((Sparsity(8, sinks=2, recent=4), 200), (Sparsity(100, sinks=4, recent=16), 0)):
        sparse = made(sparsity, dense_below=below)
        seq = sparse.cache.new_sequence()
        feed(sparse, seq, keys, values)
        got = sparse.attend(0, q[-1:], [seq], [1], SCALE)[0]
        assert torch.equal(got, sparse.cache.attend(0, q[-1:], [seq], [1], SCALE)[0])
        with pytest.raises(ArgumentError, match="has no choice in layer 0"):
            sparse.chosen(0, seq)


def test_summaries_of_equal_tokens_lose_nothing() -> None:
    sparse = made(Sparsity(16, sinks=0, recent=8, page_size=8, candidates=1, summaries=True))
    q, keys, values = rows(200)
    keys[:192], values[:192] = (part[::8].repeat_interleave(8, 0)[:192] for part in (keys, values))
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys, values)
    for softcap in (0.0, 3.0):
        got, lse = sparse.attend(0, q[-1:], [seq], [1], SCALE, return_lse=True, softcap=softcap)
        want, want_lse = sparse.cache.attend(0, q[-1:], [seq], [1], SCALE, return_lse=True, softcap=softcap)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


def test_summaries_beside_an_older_choice_count_no_token_twice() -> None:
    sparse = made(Sparsity(16, sinks=0, recent=8, page_size=8, candidates=1, reselect=12, summaries=True))
    q, keys, values = rows(224)
    keys, values = (part[::8].repeat_interleave(8, 0) for part in (keys, values))
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys[:200], values[:200])
    for i in range(200, 224):
        feed(sparse, seq, keys[i : i + 1], values[i : i + 1])
        got, lse = sparse.attend(0, q[i : i + 1], [seq], [1], SCALE, return_lse=True)
        want, want_lse = sparse.cache.attend(0, q[i : i + 1], [seq], [1], SCALE, return_lse=True)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


def test_summaries_come_nearer_than_leaving_out() -> None:
    q, keys, values = rows(600)
    errors = []
    for summaries in (False, True):
        sparse = made(Sparsity(32, summaries=summaries, recent=16))
        seq = sparse.cache.new_sequence()
        feed(sparse, seq, keys, values)
        got = sparse.attend(0, q[-1:] / 4, [seq], [1], SCALE)[0]
        want = sparse.cache.attend(0, q[-1:] / 4, [seq], [1], SCALE)[0]
        errors.append(float((got - want).norm() / want.norm()))
    assert errors[1] < errors[0] / 2


def test_a_choice_outlives_a_change_of_the_block_size() -> None:
    sparsity = Sparsity(20, sinks=2, recent=8, reselect=0)
    q, keys, values = rows(250)
    sparse = made(sparsity, 8)
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys, values)
    sparse.attend(0, q[:1], [seq], [1], SCALE)
    chosen = sparse.chosen(0, seq)
    for block_size in (16, 128):
        target = nan_cache((LAYER,), 1280 // block_size, block_size)
        other = target.new_sequence()
        target.layers[0].write(target.append(other, 250), keys, values)
        moved = sparse.moved_to(target, {seq: other})
        got = moved.attend(0, q[1:2], [other], [1], SCALE)[0]
        assert torch.equal(moved.chosen(0, other), chosen)
        torch.testing.assert_close(got, sparse.attend(0, q[1:2], [seq], [1], SCALE)[0])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("reselect", [0, 1, 3])
def test_choices_last_as_many_steps_as_asked(reselect: int, page_size: int) -> None:
    q, keys, values = rows(260)
    sparse = made(Sparsity(12, sinks=2, recent=4, page_size=page_size, reselect=reselect))
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys[:250], values[:250])
    choices = []
    for i in range(250, 260):
        feed(sparse, seq, keys[i : i + 1], values[i : i + 1])
        out = sparse.attend(0, q[i : i + 1], [seq], [1], SCALE)[0]
        choices.append(sparse.chosen(0, seq))
        age = (i - 250) % reselect if reselect else 0
        newest = range(recent_from(sparse.sparsity, i + 1 - age), i + 1)  # what came since the choice is among them
        for head in range(2):
            seen = sorted({0, 1, *choices[-1][head].tolist(), *newest} - {-1})
            logits = (q[i].unflatten(0, (2, -1))[head] @ keys[seen, head].T * SCALE).softmax(-1)
            torch.testing.assert_close(
                out[0, 2 * head : 2 * head + 2], logits @ values[seen, head], rtol=1e-4, atol=1e-5
            )
    same = [torch.equal(a, b) for a, b in zip(choices[1:], choices, strict=False)]
    assert same == [bool(not reselect or i % reselect) for i in range(1, 10)]


def test_a_choice_may_be_dropped() -> None:
    q, keys, values = rows(260)
    sparse = made(Sparsity(12, sinks=2, recent=4, reselect=0))
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys, values)
    sparse.attend(0, q[:1], [seq], [1], SCALE)
    first = sparse.chosen(0, seq)
    sparse.attend(0, -q[:1], [seq], [1], SCALE)
    assert torch.equal(sparse.chosen(0, seq), first)
    sparse.choose_again(seq)
    sparse.attend(0, -q[:1], [seq], [1], SCALE)
    assert not torch.equal(sparse.chosen(0, seq), first)
    sparse.choose_again(99)  # of whom nothing is known


def test_topk_by_layer() -> None:
    q, keys, values = rows(200)
    for topk in ([40, 20, 10], lambda layer: 40 >> layer):
        sparse = made(Sparsity(topk, sinks=0, recent=4), num_layers=3)
        seq = sparse.cache.new_sequence()
        slots = sparse.cache.append(seq, 200)
        for layer, count in enumerate((40, 20, 10)):
            sparse.write(layer, [seq], [200], slots, keys, values)
            sparse.attend(layer, q[-1:], [seq], [1], SCALE)
            assert (sparse.chosen(layer, seq) >= 0).sum(1).tolist() == [count] * 2


@pytest.mark.parametrize(
    ("kv_format", "layout"),
    [("auto", "HND"), ("auto", "interleaved"), ("int8", "NHD"), ("int8", "HND"), ("fp8_e4m3", "NHD"),
     ("fp8_e4m3", "HND"), ("fp8_e4m3:head", "NHD"), ("fp4_e2m1/int8", "NHD"), ("mxfp4", "NHD"), ("nvfp4", "NHD"),
     ("auto/mxfp8", "NHD")],
)  # fmt: skip
def test_formats_and_layouts(kv_format: str, layout: str) -> None:
    sparsity = Sparsity(24, sinks=3, recent=10)
    sparse = made(sparsity, kv_format=kv_format, layout=layout)
    q, keys, values = rows(150)
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys, values)
    known = sparse.cache.read(0, seq)
    sparse.forget(seq)  # pages are then those of the rows that the cache gives back, as the oracle's
    out = sparse.attend(0, q[-2:], [seq], [2], SCALE)[0]
    for i, got in enumerate(out, 148):
        np.testing.assert_allclose(got.numpy(), oracle(sparsity, q[i], *known, i + 1), rtol=1e-4, atol=1e-5)


def test_batch_mates_change_nothing() -> None:
    sparse = made(Sparsity(16, recent=8))
    q, keys, values = rows(700, seed=3)
    seqs, lengths = [], (100, 40, 333)
    start = 0
    for length in lengths:
        seqs.append(sparse.cache.new_sequence())
        feed(sparse, seqs[-1], keys[start : start + length], values[start : start + length])
        start += length
    together = sparse.attend(0, q[:6], seqs, [1, 2, 3], SCALE)[0]
    assert torch.equal(sparse.attend(0, q[1:3], seqs, [0, 2, 0], SCALE)[0], together[1:3])
    for i, (seq, count) in enumerate(zip(seqs, (1, 2, 3), strict=True)):
        first = sum((1, 2, 3)[:i])
        assert torch.equal(sparse.attend(0, q[first : first + count], [seq], [count], SCALE)[0],
                           together[first : first + count])  # fmt: skip
    out, lse = sparse.attend(0, q[:0], [], [], SCALE, return_lse=True)
    assert (out.shape, lse.shape) == ((0, HEADS, 32), (0, HEADS))


def test_forks_and_truncated_sequences_are_learnt_anew() -> None:
    sparse = made(Sparsity(16, recent=8))
    q, keys, values = rows(400)
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys[:200], values[:200])
    child = sparse.cache.fork(seq)
    feed(sparse, child, keys[200:260], values[200:260])
    sparse.cache.truncate(seq, 90)
    feed(sparse, seq, keys[300:410], values[300:410])
    for which, own in ((child, range(260)), (seq, [*range(90), *range(300, 400)])):
        fresh = made(Sparsity(16, recent=8))
        other = fresh.cache.new_sequence()
        feed(fresh, other, keys[[*own]], values[[*own]])
        want = fresh.attend(0, q[:2], [other], [2], SCALE)[0]
        assert torch.equal(sparse.attend(0, q[:2], [which], [2], SCALE)[0], want)


@pytest.mark.parametrize("length", [90, 260])
def test_what_others_truncate_or_append_is_learnt_before_it_is_read(length: int) -> None:
    q, keys, values = rows(260)
    sparse, fresh = (made(Sparsity(16, recent=8, reselect=200)) for _ in range(2))
    seq, other = sparse.cache.new_sequence(), fresh.cache.new_sequence()
    feed(sparse, seq, keys[:200], values[:200])
    sparse.attend(0, q[:1], [seq], [1], SCALE)
    if length < 200:
        sparse.cache.truncate(seq, length)
    else:
        sparse.cache.layers[0].write(sparse.cache.append(seq, length - 200), keys[200:], values[200:])
    feed(fresh, other, keys[:length], values[:length])
    want = fresh.attend(0, q[1:2], [other], [1], SCALE)[0]
    assert torch.equal(sparse.attend(0, q[1:2], [seq], [1], SCALE)[0], want)


def test_attention_sinks_enter_once() -> None:
    sparse = made(Sparsity(16, recent=8, summaries=True))
    q, keys, values = rows(200)
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, keys, values)
    sinks = torch.tensor([0.5, -1.0, 30.0, 0.0])
    plain, lse = sparse.attend(0, q[-1:], [seq], [1], SCALE, return_lse=True)
    got, got_lse = sparse.attend(0, q[-1:], [seq], [1], SCALE, return_lse=True, sinks=sinks)
    torch.testing.assert_close(got, plain * (lse - torch.logaddexp(lse, sinks)).exp()[..., None])
    assert torch.equal(got_lse, lse)


def test_stages_are_timed_and_advice_given() -> None:
    q, keys, values = rows(200)
    for kv_format in ("auto", "int8"):
        sparse = made(Sparsity(16, recent=8), timed=True, kv_format=kv_format)
        assert sparse.advice() is None
        seq = sparse.cache.new_sequence()
        feed(sparse, seq, keys, values)
        sparse.attend(0, q[-1:], [seq], [1], SCALE)
        assert set(sparse.seconds) == {"codec", "index", "top_k", "gather", "attention"}
        spent = {stage for stage, seconds in sparse.seconds.items() if seconds > 0}
        assert spent == {"index", "top_k", "attention"} | ({"codec"} if kv_format == "int8" else set())
        child = sparse.cache.fork(seq)  # its pages are learnt from rows that are gathered
        sparse.attend(0, q[-1:], [child], [1], SCALE)
        assert sparse.seconds["gather"] > 0


@pytest.mark.parametrize(
    ("spent", "share"),
    [
        (dict(index=3.0, top_k=1.0, attention=6.0), "40%"),
        (dict(index=1.0, top_k=1.0, gather=1.0, attention=7.0), "30%"),
        (dict(index=3.0, top_k=1.0, attention=100.0), None),
        (dict(index=1.0, top_k=1.0, attention=8.0), None),  # just at the limit
        (dict(codec=90.0, index=3.0, top_k=1.0, attention=6.0), "40%"),  # coding is due whatever is read
        (dict(index=3.0, attention=1.0), None),  # all dense: nothing was chosen
        ({}, None),
    ],
)
def test_advice_is_given_above_a_fifth(spent: dict[str, float], share: str | None) -> None:
    text = advice(dict.fromkeys(STAGES, 0.0) | spent, reselect=3)
    assert (text is None) == (share is None)
    if share is not None and text is not None:
        assert f"choosing tokens takes {share} of the attention time" in text
        assert "choose less often (reselect 8), or a larger top-k" in text
        assert f"gather {'1 s' if spent.get('gather') else 'in place'}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(topk=0), "topk is 0 in layer 0; it must be from 1"),
        (dict(topk=8.5), "topk of Sparsity is 8.5; it must be a whole number"),
        (dict(topk=[8, 8]), "topk has 2 entries for 1 layers"),
        (dict(topk=lambda layer: layer), "topk is 0 in layer 0"),
        (dict(topk=8, sinks=-1), "sinks is -1"),
        (dict(topk=8, recent=0), "recent is 0; it must be from 1"),
        (dict(topk=8, page_size=0), "page_size is 0"),
        (dict(topk=8, candidates=0), "candidates is 0"),
        (dict(topk=8, reselect=-1), "reselect is -1"),
    ],
)
def test_rules_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(Sparsity(**arguments))


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (MlaLayer(32, 8), {}, "cache has MlaLayers.*sparse_mla_attention"),
        (LAYER, dict(kv_format="int8", keep_recent=4), "cache keeps recent or first tokens in full precision"),
        (LAYER, dict(kv_format="int4:32"), "cache has kv_format 'int4:32', whose keys share scales"),
    ],
)
def test_caches_that_it_cannot_read(layer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SparseAttention(PagedCache([layer], 4, 32, torch.float32, **options), Sparsity(8))


def test_queries_that_do_not_fit() -> None:
    sparse = made(Sparsity(8))
    seq = sparse.cache.new_sequence()
    feed(sparse, seq, *rows(20)[1:])
    with pytest.raises(ArgumentError, match="q has 3 heads and layer 0 has 2 kv heads"):
        sparse.attend(0, torch.zeros(1, 3, 32), [seq], [1], SCALE)
    with pytest.raises(ArgumentError, match="layer is 1; the cache has 1"):
        sparse.attend(1, torch.zeros(1, 4, 32), [seq], [1], SCALE)
