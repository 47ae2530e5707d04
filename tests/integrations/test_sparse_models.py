"""DeepSeek-V3.2, GLM-5 and DeepSeek-V4 decode through kvbackend's layers as they do through transformers' own."""

from __future__ import annotations

import copy
import pickle
from functools import cache

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.models.deepseek_v4", reason="this transformers has no deepseek_v4")

import transformers
from transformers import DynamicCache

from kvbackend import ArgumentError, UnsupportedError, backends, use
from kvbackend.cache import OutOfBlocks, dsa, shared_kv
from kvbackend.cache import layers as mla_layers
from kvbackend.integrations.transformers import SparseCache, families, new_cache, patch, unpatch

from .models import MODELS, NEW_TOKENS, build, cache_of, generate, prompt

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < families.TESTED
pytestmark = pytest.mark.skipif(OLD, reason=f"sparse models are refused on transformers {transformers.__version__}")

_DSA = dict(MODELS["deepseek v3"][1], index_n_heads=32, index_head_dim=8, index_topk=6)
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_V4 = dict(
    num_key_value_heads=1, head_dim=16, partial_rotary_factor=0.25, q_lora_rank=12, o_groups=2, o_lora_rank=8,
    index_n_heads=32, index_head_dim=8, index_topk=3, sliding_window=8, num_hidden_layers=4,
    layer_types=["sliding_attention", _CSA, _HCA, _CSA], compress_rates={_CSA: 4, _HCA: 8}, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=16, hc_mult=2, num_hash_layers=1,
    rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1),
)  # fmt: skip
SPARSE = {
    "deepseek v3.2": ("deepseek_v32", _DSA),
    "glm-5": ("glm_moe_dsa", _DSA),
    "glm-5, shared selection": ("glm_moe_dsa", dict(_DSA, indexer_types=["full", "shared"])),
    "deepseek v4": ("deepseek_v4", _V4),
}
EVERY_MODEL = pytest.mark.parametrize("name", SPARSE)
ONE_OF_EACH = pytest.mark.parametrize("name", ["deepseek v3.2", "deepseek v4"])
# transformers rounds angles to float32, in another order of sums
CLOSE = dict(rtol=0, atol=1e-4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors gain nothing from more, and threads that wait for each other slow a busy machine down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def references():
    with use("reference"):
        yield


@pytest.fixture(autouse=True)
def pages_of_nan(monkeypatch):
    """Memory that nobody wrote is NaN, so a read of it shows."""
    real = torch.empty
    for module in (dsa, shared_kv, mla_layers):
        fake = type("torch", (), {"__getattr__": lambda self, name: getattr(torch, name)})()
        fake.empty = lambda *size, **options: real(*size, **options).fill_(torch.nan)
        monkeypatch.setattr(module, "torch", fake)


@cache
def model_of(name):
    model_type, options = SPARSE[name]
    model = build(model_type, **options)
    generator = torch.Generator().manual_seed(2)
    for key, parameter in model.named_parameters():
        if "position_bias" in key or key.endswith("norm.weight"):
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    return model


@cache
def eager(name, padding=(0,), **options):
    """What the unpatched model generates: to be asked for before the model is patched."""
    assert "_kvbackend" not in vars(model_of(name))
    return generate(model_of(name), prompt(padding), **options)


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


def same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), **CLOSE)


@EVERY_MODEL
def test_greedy_tokens_are_those_of_transformers(name, patched):
    """The pool starts with 16 blocks, and grows."""
    want = eager(name)
    same(generate(patched(name), prompt((0,))), want)
    assert want.sequences.shape[1] == 11 + NEW_TOKENS
    assert want.sequences[0, 11:].unique().numel() > 5  # not one token over and over


@pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)
@ONE_OF_EACH
def test_greedy_tokens_on_the_cpu_kernels(name, patched):
    want = eager(name)
    with use("cpu", ops=["compress_kv", "shared_kv_attention", "store_rows", "apply_rope", "copy_blocks"]):
        same(generate(patched(name), prompt((0,))), want)


# Records hold rows of one width, so these models are wider; all is selected, so that rounded index keys change nothing.
# The root of the mean square of what E4M3 rounds off is 0.026 of a number; each layer adds at most as much.
WIDE = {
    "deepseek v3.2": ("v32_fp8_656", 2 * (656 + 132)),
    "glm-5": ("v32_fp8_656", 2 * (656 + 132)),
    "deepseek v4": ("v4_fp8_584", 2 * (584 + 132) / 4 + 584 / 8),
}


@pytest.mark.parametrize("name", WIDE)
def test_generation_over_records(name):
    kv_format, bytes_per_token = WIDE[name]
    model_type, options = SPARSE[name]
    sizes = dict(kv_lora_rank=512, qk_rope_head_dim=64)
    if model_type == "deepseek_v4":
        sizes = dict(head_dim=512, partial_rotary_factor=64 / 512)
    model = patch(build(model_type, **{**options, **sizes, "index_head_dim": 128, "index_topk": 64}), block_size=8)
    inputs = prompt((0,))
    with torch.no_grad():
        want = model(**inputs, cache=new_cache(model)).logits
        cache = new_cache(model, kv_format=kv_format)
        got = model(**inputs, cache=cache).logits
    assert cache.pages.bytes_per_token == bytes_per_token
    assert 1e-3 < (got - want).norm() / want.norm() < 0.026 * len(cache.layers)
    whole = generate(model, inputs, cache=new_cache(model, kv_format=kv_format), max_new_tokens=4)
    chunks = new_cache(model, kv_format=kv_format)
    again = generate(model, inputs, cache=chunks, max_new_tokens=4, prefill_chunk_size=4)
    assert torch.equal(again.sequences, whole.sequences)
    moved = torch.stack(again.logits) - torch.stack(whole.logits)  # float32 rounds otherwise, and few codes flip
    assert moved.norm() / torch.stack(whole.logits).norm() < 0.1 * (got - want).norm() / want.norm()
    unpatch(model)


@pytest.mark.parametrize(
    ("name", "kv_format", "message"),
    [
        (
            "deepseek v3.2",
            "v4_fp8_584",
            "whose records hold shared_kv; this model caches mla: choose 'auto' or one of v32",
        ),
        ("deepseek v4", "v32_fp8_656", "whose records hold mla; this model caches shared_kv"),
        ("deepseek v3.2", "int8", "record is 'int8'; it must be one of"),
    ],
)
def test_records_of_another_model(name, kv_format, message, patched):
    with pytest.raises(ArgumentError, match=message):
        new_cache(patched(name), kv_format=kv_format)


@EVERY_MODEL
def test_padded_rows_are_the_rows_alone(name, patched):
    """Transformers itself agrees in MLA; its DeepSeek-V4 compresses padding, so rows alone are the measure."""
    padding = (6, 0, 3)
    whole = prompt(padding)
    alone = []
    for row, count in enumerate(padding):
        inputs = {key: tensor[row : row + 1, count:] for key, tensor in whole.items()}
        alone.append(generate(model_of(name), inputs).sequences[0, -NEW_TOKENS:])
    got = generate(patched(name), whole)
    assert torch.equal(got.sequences[:, -NEW_TOKENS:], torch.stack(alone))


@EVERY_MODEL
def test_chunked_prefill_changes_nothing(name, patched):
    want = eager(name)
    same(generate(patched(name), prompt((0,)), prefill_chunk_size=4), want)


@EVERY_MODEL
def test_beam_search(name, patched):
    options = dict(num_beams=3, max_new_tokens=24, output_logits=False)
    want = eager(name, **options)
    assert torch.equal(generate(patched(name), prompt((0,)), **options).sequences, want.sequences)


@EVERY_MODEL
def test_a_forward_without_a_cache(name, patched):
    inputs = prompt((0, 0))
    with torch.no_grad():
        want = model_of(name)(**inputs, use_cache=False).logits
        got = patched(name)(**inputs, use_cache=False).logits
    torch.testing.assert_close(got, want, **CLOSE)


@EVERY_MODEL
def test_a_cache_is_continued(name, patched):
    want = eager(name)
    model = patched(name)
    pages = new_cache(model)
    first = generate(model, prompt((0,)), cache=pages, max_new_tokens=20)
    assert cache_of(first) is pages
    ids = first.sequences
    rest = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    again = generate(model, rest, cache=pages, max_new_tokens=NEW_TOKENS - 20)
    assert torch.equal(again.sequences, want.sequences)


@EVERY_MODEL
def test_the_last_token_may_be_taken_back(name, patched):
    ids, model = eager(name).sequences, patched(name)
    pages = new_cache(model)
    with torch.no_grad():
        model(ids[:, :30], cache=pages)
        model(ids[:, 31:32], cache=pages)  # another token
        pages.crop(-1)
        got = model(ids[:, 30:33], cache=pages).logits
        want = unpatch(model)(ids[:, :33]).logits[:, 30:]
    torch.testing.assert_close(got, want, **CLOSE)


def test_rings_that_lost_too_much_say_so(patched):
    ids, model = eager("deepseek v4").sequences, patched("deepseek v4")
    pages = new_cache(model)
    with torch.no_grad():
        model(ids[:, :30], cache=pages)
        with pytest.raises(ArgumentError, match="length is 20; a token at that position needs"):
            pages.crop(-10)
        assert pages.get_seq_length() == 30
        pages.crop(-30)  # to the beginning always works
        got = model(ids[:, :5], cache=pages).logits
        want = unpatch(model)(ids[:, :5]).logits
    torch.testing.assert_close(got, want, **CLOSE)


@ONE_OF_EACH
def test_running_out_of_blocks_leaves_the_cache_as_it_was(name, patched):
    ids, model = eager(name).sequences, patched(name, num_blocks=4)
    pages = new_cache(model)
    with torch.no_grad():
        model(ids[:, :9], cache=pages)
        with pytest.raises(OutOfBlocks):
            model(ids[:, 9:60], cache=pages)
        assert pages.get_seq_length() == 9
        got = model(ids[:, 9:11], cache=pages).logits
        want = unpatch(model)(ids[:, :11]).logits[:, 9:]
    torch.testing.assert_close(got, want, **CLOSE)
    pages.reset()
    assert (pages.get_seq_length(), pages.batch_size, pages.pages.pool.num_used) == (0, -1, 0)


@ONE_OF_EACH
def test_weights_are_the_models_own(name, patched):
    """A change of weights after the patch shows at once."""
    model = copy.deepcopy(unpatch(model_of(name)))
    ids = eager(name).sequences[:, :20]
    patch(model, block_size=4)
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        weight = model.model.layers[0].self_attn.q_b_proj.weight
        weight.copy_(weight.flip(0))
        after = model(ids, use_cache=False).logits
        want = unpatch(model)(ids, use_cache=False).logits
    torch.testing.assert_close(after, want, **CLOSE)
    assert (after - before).abs().max() > 1e-2


@ONE_OF_EACH
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_weights_of_its_own(name, duplicate, patched):
    ids, model = eager(name).sequences[:, :20], patched(name)
    other = duplicate(model)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        for parameter in other.parameters():
            parameter.zero_()
        torch.testing.assert_close(model(ids, use_cache=False).logits, want, rtol=0, atol=0)
        assert (other(ids, use_cache=False).logits == 0).all()


@EVERY_MODEL
def test_unpatch_gives_everything_back(name):
    model = model_of(name)
    want = eager(name)
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    unpatch(patch(model))
    after = {key: dict(vars(module)) for key, module in model.named_modules()}
    assert {key: set(names) for key, names in after.items()} == {key: set(names) for key, names in before.items()}
    same(generate(model, prompt((0,))), want)


@ONE_OF_EACH
def test_refusals(name, patched):
    model, inputs = patched(name), prompt((0, 0))
    with pytest.raises(ArgumentError, match="cache is a DynamicCache; a patched model takes a SparseCache"):
        generate(model, inputs, cache=DynamicCache())
    with pytest.raises(ArgumentError, match="cache is a DynamicCache; a patched sparse model takes a SparseCache"):
        model(**inputs, cache=DynamicCache())
    pages = new_cache(model)
    assert isinstance(pages, SparseCache)
    model(**inputs, cache=pages)
    with pytest.raises(ArgumentError, match="the batch has 1 rows; this cache holds 2"):
        model(inputs["input_ids"][:1], cache=pages)
    with pytest.raises(ArgumentError, match="the rows of a SparseCache cannot become more"):
        pages.batch_repeat_interleave(2)
    unpatch(model)
    with pytest.raises(ArgumentError, match="a SparseCache is given to a model that is not patched"):
        model(**inputs, cache=new_cache(model))
    with pytest.raises(UnsupportedError, match="keep_recent is given; a sparse model keeps"):
        patch(model, keep_recent=4)
    with pytest.raises(
        UnsupportedError, match="kv_format is 'bf16'; a sparse model keeps rows as they are, or in records"
    ):
        patch(model, kv_format="bf16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "its RoPE is dynamic"),
        (dict(attention_bias=True), "its attention has biases"),
    ],
)
def test_models_that_are_refused(change, message):
    model = build("deepseek_v32", **_DSA | change)
    with pytest.raises(UnsupportedError, match=message):
        patch(model)
    assert not any("forward" in vars(module) for module in model.modules())
