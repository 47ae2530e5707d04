"""Sparse attention in transformers models: choosing all tokens is eager attention, choosing few is another."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import kvbackend
from kvbackend import ArgumentError
from kvbackend.cache import SparseAttention, Sparsity
from kvbackend.compress import H2O
from kvbackend.integrations.transformers import new_cache, patch, unpatch

from .models import build, cache_of, eager, generate, model_of, prompt


@pytest.fixture(autouse=True, scope="module")
def _reference():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with kvbackend.use("reference"):
        yield
    torch.set_num_threads(threads)


def ours(name, options=None, **settings):
    model = patch(model_of(name), block_size=4, **settings)
    try:
        return generate(model, **(options or {}))
    finally:
        unpatch(model)


@pytest.mark.parametrize(("reselect", "sparse_prompt"), [(1, True), (5, False)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2, softcap", "gpt-oss, sinks", "mistral, window"])
def test_choosing_all_is_eager(name: str, reselect: int, sparse_prompt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseAttention, "_dense", lambda *_: False)  # a choice that covers all is dense otherwise
    sparsity = Sparsity(128, sinks=2, recent=3, page_size=4, reselect=reselect)
    output = ours(name, sparse=sparsity, sparse_prompt=sparse_prompt)
    assert torch.equal(output.sequences, eager(name).sequences)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(eager(name).logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [dict(num_beams=3, max_new_tokens=12), dict(prefill_chunk_size=4)])
def test_beams_and_chunks(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseAttention, "_dense", lambda *_: False)
    output = ours("llama", options, sparse=Sparsity(128, page_size=4), sparse_prompt=True)
    expected = eager("llama", **{name: count for name, count in options.items() if name != "prefill_chunk_size"})
    assert torch.equal(output.sequences, expected.sequences)


def test_choosing_few_reads_few() -> None:
    model = build("llama")
    inputs = prompt((0,), 60)
    expected = generate(model, inputs, max_new_tokens=8)
    patch(model, block_size=4)
    try:
        cache = new_cache(model, sparse=Sparsity(8, sinks=1, recent=4, page_size=4), timed=True)
        output = generate(model, inputs, max_new_tokens=8, past_key_values=cache)
        assert cache_of(output) is cache
        assert cache.store.sparse.chosen(1, cache.store.rows[0]).shape == (2, 8)
        for op in ("page_logits", "token_logits", "topk_indices", "sparse_attention"):
            assert cache.backends[op] == "reference"
        spent = cache.store.sparse.seconds
        assert {stage for stage in spent if spent[stage] > 0} == {"index", "top_k", "attention"}
        torch.testing.assert_close(output.logits[0], expected.logits[0], atol=1e-4, rtol=1e-4)  # prompts are dense
        assert not torch.allclose(output.logits[-1], expected.logits[-1], atol=1e-3)
        cache.reset()
        again = generate(model, inputs, max_new_tokens=8, past_key_values=cache)
        assert torch.equal(again.sequences, output.sequences)
    finally:
        unpatch(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sparse=Sparsity(8), evict=H2O(16)), "sparse is given with evict"),
        (dict(sparse_prompt=True), "sparse_prompt or dense_below is given without sparse"),
        (dict(dense_below=9), "given without sparse"),
    ],
)
def test_refusals(options, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        new_cache(model_of("llama"), **options)


def test_mla_is_refused_with_the_op_that_does_it() -> None:
    model = patch(model_of("deepseek v3"), sparse=Sparsity(8))
    try:
        with pytest.raises(ArgumentError, match="sparse_mla_attention"):
            generate(model, max_new_tokens=2)
    finally:
        unpatch(model)
