"""Models that decode through kvbackend find the tokens that they find with transformers' own eager attention."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from kvbackend import ArgumentError, UnsupportedError, layouts
from kvbackend import cache as paging
from kvbackend.cache import OutOfBlocks
from kvbackend.integrations import transformers as integration
from kvbackend.integrations.transformers import attention, new_cache, patch, patching, unpatch
from kvbackend.integrations.transformers.cache import Step

from .models import MODELS, NEW_TOKENS, build, cache_of, eager, generate, model_of, prompt

FEW = ["llama", "mistral, window", "deepseek v3"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors gain nothing from more, and threads that wait for each other slow a busy machine down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def pages_of_nan(monkeypatch):
    """Memory that nobody wrote is NaN, so a read of it shows."""
    real = torch.empty
    for module in (layouts, paging.layers):
        fake = type("torch", (), {"__getattr__": lambda self, name: getattr(torch, name)})()
        fake.empty = lambda *size, **options: real(*size, **options).fill_(torch.nan)
        monkeypatch.setattr(module, "torch", fake)


@pytest.fixture
def patched():
    """`patched(name, **options)`: a model that decodes through kvbackend until the test ends."""
    models = []

    def make(name, **options):
        model = patch(model_of(name), **{"block_size": 4, **options})
        models.append(model)
        return model

    yield make
    for model in models:
        unpatch(model)


def assert_same(ours, expected):
    """Same tokens and logits; ours may stop sooner."""
    steps, length = len(ours.logits), ours.sequences.shape[1]
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits[:steps]), atol=2e-4, rtol=2e-4)
    assert torch.equal(ours.sequences, expected.sequences[:, :length])


# -------------------------------------------------------------------------------------------------- equal to eager


@pytest.mark.parametrize("name", MODELS)
def test_tokens_with_left_padding(name, patched):
    expected = eager(name)
    output = generate(patched(name))
    assert_same(output, expected)
    assert len(expected.sequences[:, 11:].unique()) > 10  # a model that repeats itself would prove little


@pytest.mark.parametrize(("name", "chunk"), [*((name, 5) for name in MODELS), *((name, 2) for name in FEW)])
def test_chunked_prefill(name, chunk, patched):
    """With chunks of 2 some chunks are all padding for one row."""
    expected = eager(name)
    assert_same(generate(patched(name), prefill_chunk_size=chunk, max_new_tokens=12), expected)


@pytest.mark.parametrize("name", [*FEW, "gpt-oss, sinks"])
def test_beam_search(name, patched):
    expected = eager(name, num_beams=3, max_new_tokens=24)
    output = generate(patched(name), num_beams=3, max_new_tokens=24)
    assert torch.equal(output.sequences, expected.sequences)
    pages = cache_of(output).pages
    assert pages.blocks_used < sum(-(-pages.length(row) // 4) for row in pages.sequences)  # beams share blocks


@pytest.mark.parametrize("name", FEW)
def test_rollback_in_prompt_lookup(name, patched, monkeypatch):
    expected = eager(name, (0,), prompt_lookup_num_tokens=3)
    crops = []
    real = integration.PagedCache.crop
    monkeypatch.setattr(integration.PagedCache, "crop", lambda self, n: (crops.append(n), real(self, n))[1])
    output = generate(patched(name), prompt((0,)), prompt_lookup_num_tokens=3)
    assert torch.equal(output.sequences, expected.sequences)
    assert min(crops) < 0


def test_draft_model(patched):
    draft = build("llama", num_hidden_layers=1)
    inputs = prompt((0,))
    expected = generate(model_of("llama"), inputs, assistant_model=draft, max_new_tokens=24)
    output = generate(patched("llama"), inputs, assistant_model=patch(draft), max_new_tokens=24)
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize("name", FEW)
def test_second_generate_continues_the_cache(name, patched):
    expected = eager(name)
    model = patched(name)
    inputs, cache = prompt(), new_cache(model)
    first = generate(model, inputs, cache=cache, max_new_tokens=20).sequences
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 20, dtype=torch.long)), 1)
    tokens_before = cache.tokens
    second = generate(model, dict(input_ids=first, attention_mask=mask), cache=cache, max_new_tokens=NEW_TOKENS - 20)
    assert torch.equal(second.sequences, expected.sequences)
    assert tokens_before == 2 * (11 + 19) - 6
    assert cache.tokens == 2 * (11 + NEW_TOKENS - 1) - 6


def test_row_that_ends_early(patched):
    free = eager("llama").sequences
    eos = next(int(token) for token in free[0, 20:] if token not in free[1])
    expected = generate(model_of("llama"), eos_token_id=eos)
    assert (expected.sequences[0] == 0).sum() > 6 + 20  # the row did end early
    assert_same(generate(patched("llama"), eos_token_id=eos), expected)


@pytest.mark.parametrize("block_size", [1, 16, 61])
@pytest.mark.parametrize("name", ["mistral, window", "deepseek v3"])
def test_block_sizes(name, block_size, patched):
    expected = eager(name)
    assert_same(generate(patched(name, block_size=block_size), max_new_tokens=24), expected)


def test_pool_grows_and_keeps_what_is_shared(patched, monkeypatch):
    monkeypatch.setattr(integration.cache, "MIN_BLOCKS", 1)
    expected = eager("llama", num_beams=3, max_new_tokens=24)
    output = generate(patched("llama", block_size=2), num_beams=3, max_new_tokens=24)
    assert torch.equal(output.sequences, expected.sequences)


def test_two_caches_in_turns(patched):
    model = patched("llama")
    first, second = prompt((3, 0)), prompt((0, 0), length=7)
    expected = generate(model, first, max_new_tokens=4), generate(model, second, max_new_tokens=4)
    caches = new_cache(model), new_cache(model, block_size=1)
    for inputs, cache, want in zip((first, second), caches, expected, strict=True):
        got = generate(model, inputs, cache=cache, max_new_tokens=2)
        assert torch.equal(got.sequences, want.sequences[:, :-2])
    for inputs, cache, want in zip((first, second), caches, expected, strict=True):
        ids = want.sequences[:, :-2]
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, 2, dtype=torch.long)), 1)
        got = generate(model, dict(input_ids=ids, attention_mask=mask), cache=cache, max_new_tokens=2)
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [dict(use_cache=False), {}], ids=["use_cache=False", "default"])
def test_forward_without_a_cache_of_ours(name, options, patched):
    inputs = prompt()
    with torch.no_grad():
        expected = model_of(name)(**inputs, **options).logits
        logits = patched(name)(**inputs, **options).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[real], expected[real], atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ the cache


@pytest.mark.parametrize("name", ["llama", "deepseek v3"])
def test_prefill_fills_the_cache(name, patched):
    inputs = prompt()
    with torch.no_grad():
        stock = cache_of(model_of(name)(**inputs)).layers
        model = patched(name)
        cache = new_cache(model)
        model(**inputs, **{patching.cache_argument(model): cache})
    for layer in range(2):
        for row, padding in enumerate((6, 0)):
            for rows, expected in zip(cache.rows(layer, row), (stock[layer].keys, stock[layer].values), strict=True):
                expected = expected[row, :, padding:].transpose(0, 1)  # [tokens, heads, dim]
                torch.testing.assert_close(rows, expected.reshape(rows.shape), atol=1e-4, rtol=1e-4)
                assert rows.abs().amax(-1).min() > 0


def test_latent_cache_is_small(patched):
    output = generate(patched("deepseek v3"), max_new_tokens=2)
    assert cache_of(output).pages.bytes_per_token == 2 * (16 + 4) * 4  # layers, kv_lora_rank + rope, float32


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (dict(kv_format="bf16"), torch.bfloat16),
        (dict(kv_format="fp16"), torch.float16),
        (dict(dtype=torch.float16), torch.float16),
        (dict(kv_format="fp32", dtype=torch.float32), torch.float32),
    ],
)
@pytest.mark.parametrize("name", ["llama", "deepseek v3"])
def test_formats(name, options, dtype, patched):
    expected = eager(name)
    output = generate(patched(name, **options), max_new_tokens=1)
    assert cache_of(output).pages.dtype is dtype
    error = (output.logits[0] - expected.logits[0]).abs().max() / expected.logits[0].abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 0.03)
    assert dtype is torch.float32 or error > 0


def test_crop_frees_blocks_and_rewinds(patched):
    expected, model = eager("llama").sequences, patched("llama")
    name = patching.cache_argument(model)
    cache, inputs = new_cache(model), prompt()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        whole = model(**inputs, **{name: cache}).logits
        assert (cache.tokens, cache.pages.blocks_used) == (5 + 11, 2 + 3)
        cache.crop(-7)
        assert (cache.tokens, cache.pages.blocks_used) == (4, 1)
        assert cache.get_seq_length() == 4
        again = model(ids[:, 4:], attention_mask=mask, position_ids=torch.arange(4, 11)[None], **{name: cache}).logits
    torch.testing.assert_close(again[1], whole[1, 4:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again[0, 2:], whole[0, 6:], atol=1e-4, rtol=1e-4)
    cache.crop(0)
    assert cache.get_seq_length() == 11
    cache.reset()
    assert (cache.tokens, cache.pages.blocks_used, cache.get_seq_length()) == (0, 0, 0)
    assert torch.equal(generate(model, cache=cache).sequences, expected)
    with pytest.raises(ArgumentError, match="tokens_to_remove is 3"):
        cache.crop(3)


def test_selecting_rows(patched):
    model = patched("llama")
    cache = new_cache(model)
    with torch.no_grad():
        model(**prompt(), **{patching.cache_argument(model): cache})
    before = [cache.rows(0, row)[0] for row in range(2)]
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(cache.rows(0, 0)[0], before[1])
    assert torch.equal(cache.rows(0, 1)[0], before[0])
    assert cache.pages.blocks_used == 5


def test_out_of_blocks_changes_nothing(patched):
    model = patched("llama", num_blocks=5)
    name = patching.cache_argument(model)
    inputs, cache = prompt(), new_cache(model)
    with torch.no_grad():
        model(**inputs, **{name: cache})
        before = [[tensor.clone() for tensor in layer.caches] for layer in cache.pages.layers]
        figures = cache.get_seq_length(), cache.tokens, cache.pages.blocks_used
        more = torch.cat((inputs["attention_mask"], torch.ones(2, 8, dtype=torch.long)), 1)
        with pytest.raises(OutOfBlocks):
            model(torch.ones(2, 8, dtype=torch.long), attention_mask=more, **{name: cache})
        assert (cache.get_seq_length(), cache.tokens, cache.pages.blocks_used) == figures
        for layer, copies in zip(cache.pages.layers, before, strict=True):
            for tensor, expected in zip(layer.caches, copies, strict=True):
                torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
        model(torch.ones(2, 1, dtype=torch.long), attention_mask=more[:, :12], **{name: cache})  # there is room for one
    assert cache.tokens == figures[1] + 2


def test_forward_that_fails_half_way_is_noticed(patched, monkeypatch):
    model = patched("llama")
    cache, inputs = new_cache(model), prompt()
    arguments = {patching.cache_argument(model): cache}
    hook = model.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(**inputs, **arguments)
    hook.remove()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"failed half-way: call reset\(\)"):
        model(**inputs, **arguments)
    cache.reset()
    with torch.no_grad():
        model(**inputs, **arguments)


def test_backends_are_noted(patched):
    cache = cache_of(generate(patched("llama"), max_new_tokens=2))
    assert set(cache.backends) == {"reshape_and_cache", "paged_attention"}
    cache = cache_of(generate(patched("deepseek v3"), max_new_tokens=2))
    assert set(cache.backends) == {"concat_and_cache_mla", "absorb_q", "mla_attention", "project_out"}


# ------------------------------------------------------------------------------------------- padding is not lost


def test_hidden_padding_would_show(patched, monkeypatch):
    """The comparison with eager can fail: without the padding the tokens are others."""
    expected = eager("llama")
    model = patched("llama")
    blind = lambda **options: attention.padding_mask(**{**options, "attention_mask": None})  # noqa: E731
    AttentionMaskInterface.register(integration.NAME, blind)
    try:
        output = generate(model)
    finally:
        integration.register()
    assert not torch.equal(output.sequences[0], expected.sequences[0])
    assert torch.equal(output.sequences[1], expected.sequences[1])  # the row without padding


def test_attention_without_its_mask_is_refused(patched):
    model = patched("llama")
    AttentionInterface.register("kvbackend_alone", attention.attention)
    model.set_attn_implementation("kvbackend_alone")
    with pytest.raises(ArgumentError, match="attention_mask is None"):
        generate(model)
    model.set_attn_implementation(integration.NAME)


# -------------------------------------------------------------------------------------------- patching and taking back


def test_unpatch_gives_everything_back():
    model = build("deepseek_v3", **MODELS["deepseek v3"][1])
    expected = generate(model)
    patch(model)
    assert model.config._attn_implementation == integration.NAME
    patch(model, block_size=2)  # again, with other options
    assert new_cache(model).block_size == 2
    assert unpatch(model) is model
    assert model.config._attn_implementation == "eager"
    assert "generate" not in vars(model)
    output = generate(model)
    assert type(cache_of(output)) is DynamicCache
    assert_same(output, expected)
    unpatch(model)  # does nothing


def test_patched_model_can_be_copied_and_pickled():
    model = patch(build("deepseek_v3", **MODELS["deepseek v3"][1]), block_size=4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)  # a copy that still called the original would show
        assert torch.equal(generate(twin).sequences, eager("deepseek v3").sequences)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_both_names_of_the_cache(argument, patched):
    model = patched("llama")
    cache = new_cache(model)
    generate(model, **{argument: cache}, max_new_tokens=2)
    assert cache.tokens > 0
    with pytest.raises(ArgumentError, match="both given"):
        generate(model, cache=cache, past_key_values=cache)


def test_generate_without_cache(patched):
    expected = eager("llama").sequences[:, : 11 + 8]
    assert torch.equal(generate(patched("llama"), use_cache=False, max_new_tokens=8).sequences, expected)


def test_tested_range_is_the_one_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (first_major, first, last_major, last) = map(
        int, re.search(r"transformers>=(\d+)\.(\d+),<(\d+)\.(\d+)", text).groups()
    )
    assert ((first_major, first), (last_major, last - 1)) == patching.TESTED


# ------------------------------------------------------------------------------------------------------- refusals


def refused(model, match):
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=match):
        patch(model)
    assert model.config._attn_implementation == before
    assert "generate" not in vars(model)


def test_models_that_are_refused():
    from transformers import AutoModelForSeq2SeqLM, T5Config

    small = dict(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    refused(AutoModelForSeq2SeqLM.from_config(T5Config(**small)), "it is an encoder-decoder")
    refused(build("mamba", state_size=4), "it keeps state besides keys and values")
    refused(build("llama4_text", intermediate_size_mlp=16, num_local_experts=2), "chunked")
    with pytest.raises(UnsupportedError, match="model is Linear"):
        patch(torch.nn.Linear(1, 1))


def test_projections_that_cannot_be_absorbed():
    options = MODELS["deepseek v3"][1]
    model = build("deepseek_v3", **options)
    attention_module = model.model.layers[0].self_attn
    attention_module.kv_b_proj = torch.nn.Linear(16, 4 * 14, bias=True)
    refused(model, "and a bias")
    attention_module.kv_b_proj = type("Quantized", (torch.nn.Linear,), {})(16, 4 * 14, bias=False)
    refused(model, "kv_b_proj is Quantized")


def test_versions_that_are_refused(monkeypatch):
    monkeypatch.setattr(patching.transformers, "__version__", "6.1.0")
    refused(model_of("llama"), r"transformers is 6.1.0; tested are 5.19 to 5.24: install")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(kv_format="int3"), "kv_format is 'int3'; it must be one of fp32, fp16, bf16, fp8_e4m3"),
        (dict(dtype=torch.int8), "dtype is torch.int8"),
        (dict(kv_format="fp16", dtype=torch.float32), "rows that are not codes have one dtype"),
        (dict(block_size=0), "block_size is 0"),
        (dict(num_blocks=0), "num_blocks is 0"),
    ],
)
def test_options_that_are_refused(options, match):
    with pytest.raises(ArgumentError, match=re.escape(match)):
        patch(model_of("llama"), **options)
    assert model_of("llama").config._attn_implementation == "eager"


def test_calls_that_are_refused(patched):
    model = patched("llama")
    name = patching.cache_argument(model)
    inputs = prompt()
    ids = inputs["input_ids"]
    square = torch.ones(2, 1, 11, 11, dtype=torch.bool)
    with torch.no_grad():
        with pytest.raises(ArgumentError, match=r"attention_mask is torch.bool \[2, 1, 11, 11\]"):
            model(ids, attention_mask=square)
        with pytest.raises(ArgumentError, match=r"mask contains (and_masks|packed_sequence|remap_positions)"):
            model(ids, position_ids=torch.tensor([[*range(5), *range(6)]] * 2), use_cache=False)
        stock = DynamicCache()
        model(**inputs, **{name: stock})
        with pytest.raises(ArgumentError, match=r"did not come from PagedCache\.update"):
            model(ids[:, :1], **{name: stock})
        cache = new_cache(model)
        model(**inputs, **{name: cache})
        one = torch.ones(2, 1, dtype=torch.long)
        for mask, match in (
            (torch.ones(2, 12, dtype=torch.long), "calls other cached tokens padding"),
            (torch.ones(2, 1, dtype=torch.long), "covers 1 tokens; it must cover all 12"),
        ):
            with pytest.raises(ArgumentError, match=match):
                model(one, attention_mask=mask, **{name: cache})
        with pytest.raises(ArgumentError, match="the batch has 3 rows; this cache holds 2"):
            model(torch.ones(3, 1, dtype=torch.long), attention_mask=torch.ones(3, 12), **{name: cache})
        model(one, attention_mask=torch.cat((inputs["attention_mask"], one), 1), **{name: cache})  # it still works
    with pytest.raises(ArgumentError, match="requires grad"):
        model(**inputs)
    with pytest.raises(ArgumentError, match="cache is a DynamicCache"):
        generate(model, cache=DynamicCache())
    with pytest.raises(ArgumentError, match="cache_implementation is 'static'"):
        generate(model, cache_implementation="static")


def test_masks_that_are_refused():
    from transformers import masking_utils as masks

    def same_parity(batch, head, query, key):
        return (query + key) % 2 == 0

    call = dict(batch_size=1, kv_length=3)
    for mask_function, name in (
        (masks.or_masks(masks.causal_mask_function, same_parity), "or_masks"),
        (masks.and_masks(masks.causal_mask_function, same_parity), "test_masks_that_are_refused"),
        (masks.bidirectional_mask_function, "bidirectional_mask_function"),
        (masks.chunked_causal_mask_function(2, torch.zeros(1)), "chunked_overlay"),
    ):
        with pytest.raises(ArgumentError, match=f"mask contains {name}"):
            attention.padding_mask(**call, mask_function=mask_function)
    assert attention.padding_mask(**call).tolist() == [[[[True] * 3]]]


def test_padding_comes_out_as_zeros():
    keep = torch.tensor([False, True, True, True])
    step = Step(2, (2, 2), [], keep)
    rows = step.rows(torch.arange(1.0, 9.0).view(2, 1, 2, 2))
    assert rows.tolist() == [[[3, 4]], [[5, 6]], [[7, 8]]]
    assert step.padded(rows).tolist() == [[[[0, 0]], [[3, 4]]], [[[5, 6]], [[7, 8]]]]


def test_dropout_is_refused():
    model = patch(build("llama", attention_dropout=0.5)).train()
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"dropout is 0\.5"):
        model(**prompt())


def test_unpatched_latent_model_is_told_to_patch():
    model = build("deepseek_v3", **MODELS["deepseek v3"][1])
    integration.register()
    model.set_attn_implementation(integration.NAME)
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"call patch\(model\)"):
        model(**prompt())
