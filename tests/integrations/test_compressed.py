"""Compressed caches in transformers models: formats, low rank and eviction, against transformers' eager attention."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache

import kvbackend
from kvbackend import ArgumentError, compress
from kvbackend.compress import H2O, TOVA, L2Norm, PyramidKV, SlidingWindow, SnapKV, StreamingLLM, lowrank
from kvbackend.compress.lowrank import Projection
from kvbackend.integrations import transformers as integration
from kvbackend.integrations.transformers import cache as paged
from kvbackend.integrations.transformers import new_cache, patch, patching, unpatch

from ..cache.rows import round_trip
from .models import MODELS, build, cache_of, generate, prompt

HEADS, DIM, LAYERS, BLOCK = 2, 32, 2, 4
FORMATS = [
    "fp8_e4m3", "fp8_e5m2", "fp8_e4m3:token_head", "fp8_e4m3:16", "int8", "mxfp8", "mxfp4", "nvfp4", "fp4_e2m1",
    "fp4_e2m1:32", "int8/fp4_e2m1",
]  # fmt: skip
TOKENS = 12
ALL = [
    SlidingWindow(64), StreamingLLM(64), StreamingLLM(64, positions="original"), H2O(64), TOVA(64), SnapKV(64),
    L2Norm(64), PyramidKV(64, observed=4),
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def on_references():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with kvbackend.use("reference"):  # exact, and without a warning where a kernel is missing
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama():
    return build("llama", head_dim=DIM)


@pytest.fixture(scope="module")
def shallow():
    """One layer: its keys are the same to the bit with either cache, so no number rounds to another code."""
    return build("llama", head_dim=DIM, num_hidden_layers=1)


@pytest.fixture(scope="module")
def deepseek():
    return build("deepseek_v3", **{**MODELS["deepseek v3"][1], "kv_lora_rank": 32, "num_hidden_layers": 1})


def ours(model, inputs=None, **options):
    """What the patched model generates; the model is given back as it was."""
    settings = {name: options.pop(name) for name in ("num_beams", "prefill_chunk_size") if name in options}
    patch(model, **{"block_size": BLOCK, **options})
    try:
        return generate(model, inputs, max_new_tokens=TOKENS, **settings)
    finally:
        unpatch(model)


def assert_same(output, expected):
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), atol=2e-4, rtol=2e-4)
    assert torch.equal(output.sequences, expected.sequences)


class Rounded(DynamicCache):
    """transformers' own cache, of rows that went through a codec; a name for each layer, or one for all."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def update(self, keys, values, layer, *args, **kwargs):
        key, slash, value = self.names[layer % len(self.names)].partition("/")
        rows = [through(keys, key), through(values, value if slash else key)]
        return super().update(*rows, layer, *args, **kwargs)


def through(rows, name):
    """Rows [B, H, n, D] as the codec gives them back, static scales being 1."""
    fmt, static = kvbackend.formats.get(name) if name != "auto" else None, None
    if fmt and (fmt.global_scale or fmt.granularity == "tensor"):
        static = torch.ones(1)
    batch, heads, count, dim = rows.shape
    back = round_trip(rows.transpose(1, 2).reshape(-1, heads, dim), name, static)
    return back.view(batch, count, heads, dim).transpose(1, 2)


def stock(model, inputs=None, *names, **options):
    """What the model generates with its own attention, over rounded rows where formats are named."""
    cache = {patching.cache_argument(model): Rounded(*names)} if names else {}
    return generate(model, inputs, max_new_tokens=TOKENS, **cache, **options)


# ------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("name", FORMATS)
def test_formats_equal_eager_attention_over_rounded_rows(name, shallow):
    output = ours(shallow, kv_format=name)
    assert_same(output, stock(shallow, None, name))
    assert not torch.allclose(torch.stack(output.logits), torch.stack(stock(shallow).logits), atol=1e-3)


def test_a_format_for_each_layer(llama):
    names = ["fp4_e2m1", "fp8_e4m3/int8"]
    cache = cache_of(ours(llama, kv_format=names))
    sides = [kvbackend.formats.get(side) for name in names for side in kvbackend.formats.pair(name)]
    per_token, fixed = sum(side.bytes_per_token(HEADS, DIM) for side in sides), 4  # one static scale
    blocks = -(-(5 + TOKENS - 1) // BLOCK) + -(-(11 + TOKENS - 1) // BLOCK)
    assert cache.pages.bytes_per_token == per_token
    assert cache.cache_bytes == blocks * BLOCK * per_token + fixed
    assert cache.cache_bytes_fp16 == blocks * BLOCK * LAYERS * HEADS * DIM * 2 * 2
    assert [layer.kv_format for layer in cache.pages.layers] == names


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "mxfp4", "nvfp4"])
def test_formats_of_latent_rows(name, deepseek):
    """MLA caches the latent row in the format, the rotary one as it is."""
    output = ours(deepseek, kv_format=name)
    assert_same(output, stock(deepseek, None, f"{name}/auto"))
    assert not torch.allclose(torch.stack(output.logits), torch.stack(stock(deepseek).logits), atol=1e-3)


def test_scales_are_used(llama):
    scales = [{"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([2.0])}] * LAYERS
    output = ours(llama, kv_format="fp8_e4m3", scales=scales)
    assert [layer.k_scale.item() for layer in cache_of(output).pages.layers] == [0.25] * LAYERS
    with pytest.raises(ArgumentError, match="scales has 1 entries for 2 layers"):
        ours(llama, kv_format="fp8_e4m3", scales=scales[:1])


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(prefill_chunk_size=3)], ids=str)
def test_beams_and_chunks_of_codes(options, llama):
    output, expected = ours(llama, kv_format="int8", **options), stock(llama, None, "int8", **options)
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize("keep", [dict(keep_recent=64), dict(keep_sinks=64)], ids=str)
def test_tokens_kept_whole_change_nothing(keep, llama, deepseek):
    for model in (llama, deepseek):
        output = ours(model, kv_format="mxfp4", **keep)
        assert_same(output, stock(model))


def test_keys_that_share_scales_across_tokens(llama):
    """int4 codes blocks of 32 tokens when they leave the recent ones."""
    inputs = prompt((0,), 70)
    output, expected = ours(llama, inputs, kv_format="int4", block_size=32), stock(llama, inputs)
    assert set(cache_of(output).backends) == {"quantize_kv", "paged_attention"}
    error = (output.logits[0] - expected.logits[0]).norm() / expected.logits[0].norm()
    assert 1e-3 < error < 0.3
    codes = LAYERS * HEADS * 2 * (DIM // 2 + 4)
    assert cache_of(output).cache_bytes == 3 * 32 * codes + 32 * LAYERS * HEADS * 2 * DIM * 4  # the open block whole
    assert_same(ours(llama, inputs, kv_format="int4", block_size=32, keep_recent=128), expected)


def test_recent_tokens_are_counted(llama):
    cache = cache_of(ours(llama, prompt((0,), 30), kv_format="fp4_e2m1", keep_recent=6, keep_sinks=3))
    codes = LAYERS * HEADS * 2 * (DIM // 2 + DIM // 16)
    assert cache.tokens == 41
    # 41 tokens in 11 blocks; in full precision the first block, and those of tokens 35 to 40: 8, 9 and 10
    assert cache.cache_bytes == 11 * BLOCK * codes + (1 + 3) * BLOCK * LAYERS * HEADS * 2 * DIM * 4
    assert cache.cache_bytes_fp16 == 11 * BLOCK * LAYERS * HEADS * 2 * DIM * 2


@pytest.mark.parametrize(
    "options",
    [
        dict(kv_format="nvfp4", keep_recent=7),
        dict(kv_format="fp4_e2m1", keep_recent=3, keep_sinks=3),
        dict(evict=H2O(9), summary_slots=2, kv_format="int8"),
        dict(evict=PyramidKV(10, observed=4)),
    ],
    ids=str,
)
def test_pools_grow(options, llama, monkeypatch):
    """A pool that starts with a block gives the tokens of one that had room."""
    options = {"block_size": 2, **options}
    roomy = ours(llama, num_blocks=60, **options)
    monkeypatch.setattr(paged, "MIN_BLOCKS", 1)
    model = patch(llama, **options)
    try:
        cache = new_cache(model)
        with torch.no_grad():
            first = model(torch.ones(2, 1, dtype=torch.long), **{patching.cache_argument(model): cache})
        before = cache.pages.blocks_total
        cache.reset()
        tight = generate(model, cache=cache, max_new_tokens=TOKENS)
        assert cache.pages.blocks_total > before
    finally:
        unpatch(llama)
    assert first.logits.isfinite().all()
    assert_same(tight, roomy)


# ------------------------------------------------------------------------------------------------------ low rank


def random_pairs(rank, full=False):
    """A projection of keys and of values for each layer: of orthonormal axes, or a skew basis of full rank."""
    generator, pairs = torch.Generator().manual_seed(2), []
    for _ in range(LAYERS):
        sides = []
        for _ in range(2):
            axes = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=generator, dtype=torch.float64)).Q
            down = axes[..., :rank] * (torch.linspace(1, 3, DIM, dtype=torch.float64) if full else 1)
            sides.append(Projection(down, torch.linalg.pinv(down) if full else down.mT))
        pairs.append(tuple(sides))
    return pairs


def test_a_basis_of_full_rank_changes_nothing(llama):
    """Keys are turned back, projected, reconstructed and turned again, at the positions of padded rows."""
    assert_same(ours(llama, low_rank=random_pairs(DIM, full=True)), stock(llama))


def test_low_rank_equals_a_model_of_projected_weights(llama):
    import copy

    pairs = random_pairs(16)
    projected = copy.deepcopy(llama)
    with torch.no_grad():
        for layer, sides in zip(projected.model.layers, pairs, strict=True):
            for linear, side in zip((layer.self_attn.k_proj, layer.self_attn.v_proj), sides, strict=True):
                by_head = linear.weight.double().unflatten(0, (HEADS, DIM))  # k = W x, and x is kept as k down up
                linear.weight.copy_(torch.einsum("hde,hdi->hei", side.down @ side.up, by_head).flatten(0, 1))
    output = ours(llama, low_rank=pairs)
    assert_same(output, stock(projected))
    cache = cache_of(output)
    assert cache.pages.bytes_per_token == LAYERS * HEADS * 2 * 16 * 4
    assert cache.store.projection_bytes == LAYERS * 2 * 2 * HEADS * DIM * 16 * 4
    assert set(cache.backends) == {
        "lowrank_project", "reshape_and_cache", "lowrank_reconstruct", "paged_attention",
    }  # fmt: skip


def test_calibration_is_cut_to_lower_ranks(llama):
    ids = torch.arange(1, 97).repeat(2)
    found = compress.calibrate(llama, ids, rank=DIM - 1)
    pairs = integration.projections(found, [8, DIM], [DIM - 1, 16])
    assert [[side.rank for side in pair] for pair in pairs] == [[8, DIM - 1], [DIM, 16]]
    exact = compress.calibrate(llama, ids, rank=8)
    torch.testing.assert_close(pairs[0][0].down, exact.keys[0].pair.down)
    assert torch.equal(pairs[1][0].down, lowrank.identity(HEADS, DIM).down)
    assert cache_of(ours(llama, low_rank=exact)).pages.bytes_per_token == LAYERS * HEADS * 2 * 8 * 4


def test_positions_that_count_padding_are_refused(llama):
    model = patch(llama, low_rank=random_pairs(16))
    try:
        cache = new_cache(model)
        with torch.no_grad(), pytest.raises(ArgumentError, match="turned by the count of real tokens"):
            model(**prompt(), **{patching.cache_argument(model): cache})
    finally:
        unpatch(llama)


# ------------------------------------------------------------------------------------------------------ evicting


@pytest.mark.parametrize("policy", ALL, ids=str)
def test_budget_that_is_never_reached_changes_nothing(policy, llama):
    assert_same(ours(llama, evict=policy), stock(llama))


@pytest.mark.parametrize("policy", [SlidingWindow(6), StreamingLLM(6, sinks=0)], ids=str)
def test_newest_tokens_token_by_token_are_a_sliding_window(policy):
    """A window of 7 is a query's own token and 6 before it. Row positions (StreamingLLM) keep the distances."""
    llama = build("llama", head_dim=DIM)
    windowed = build("mistral", head_dim=DIM, sliding_window=7)
    windowed.load_state_dict(llama.state_dict())
    output = ours(llama, evict=policy, prefill_chunk_size=1)
    assert_same(output, stock(windowed))
    assert [cache_of(output).store.kept.rows(row) for row in cache_of(output).store.rows] == [6, 6]


def test_smallest_keys_are_kept_after_the_prompt(llama):
    inputs = prompt((0, 0))
    with torch.no_grad():
        keys = cache_of(llama(**inputs)).layers[1].keys
    cache = cache_of(ours(llama, inputs, evict=L2Norm(5)))
    for row in range(2):
        kept = cache.store.kept.kept(cache.store.rows[row], 1)
        assert kept.shape == (HEADS, 5 + TOKENS - 1)
        smallest = keys[row].norm(dim=-1).topk(5, largest=False).indices.sort(-1).values
        assert kept[:, :5].tolist() == smallest.tolist()
        assert kept[:, 5:].tolist() == [list(range(11, 11 + TOKENS - 1))] * HEADS


def test_chunks_of_a_prompt_are_kept_until_it_ends(llama):
    whole = ours(llama, prompt((0, 0)), evict=SnapKV(6, observed=3, kernel=3))
    parts = ours(llama, prompt((0, 0)), evict=SnapKV(6, observed=3, kernel=3), prefill_chunk_size=4)
    assert_same(parts, whole)


@pytest.mark.parametrize("policy", [H2O(8), SnapKV(8, observed=2), TOVA(8), PyramidKV(8, observed=3)], ids=str)
def test_low_rank_of_full_rank_chooses_the_same_tokens(policy, llama):
    """Scores are of reconstructed keys, at the positions of the kept tokens of each head."""
    output = ours(llama, evict=policy, low_rank=random_pairs(DIM, full=True))
    assert_same(output, ours(llama, evict=policy))


@pytest.mark.parametrize(
    ("policy", "companions"), [(SnapKV(8, observed=2), 4 * (HEADS + 1)), (SlidingWindow(8), 4 / LAYERS)], ids=str
)
@pytest.mark.parametrize("slots", [0, 2])
def test_a_stack_is_counted_to_the_byte(policy, companions, slots, llama):
    """Evicted, projected and stored in 4 bits; positions, and biases of summary slots, counted."""
    inputs = prompt((0,), 30)
    options = dict(evict=policy, summary_slots=slots, low_rank=random_pairs(16), kv_format="fp4_e2m1")
    output = ours(llama, inputs, **options)
    cache = cache_of(output)
    rows = 8 if not policy.once else 8 + TOKENS - 1
    assert cache.store.kept.rows(cache.store.rows[0]) == rows
    per_row = HEADS * 2 * (16 // 2 + 1) + companions + (4 * HEADS if slots else 0)
    assert cache.cache_bytes == -(-rows // BLOCK) * BLOCK * LAYERS * per_row
    assert cache.cache_bytes_fp16 == -(-41 // BLOCK) * BLOCK * LAYERS * HEADS * DIM * 2 * 2
    assert torch.stack(output.logits).isfinite().all()


def test_summaries_of_codes_are_those_of_rows(llama):
    """int8 moves and writes summary rows of each head as full precision does, up to its rounding."""
    caches = []
    for kv_format in ("auto", "int8"):
        model = patch(llama, kv_format=kv_format, evict=H2O(8, recent=3), summary_slots=2)
        caches.append(new_cache(model))
        with torch.no_grad():
            model(**prompt((0,), 30), **{patching.cache_argument(model): caches[-1]})
        unpatch(llama)
    kept = [cache.store.kept.kept(cache.store.rows[0], 0) for cache in caches]
    assert torch.equal(*kept)
    for expected, rows in zip(*(cache.rows(0, 0) for cache in caches), strict=True):
        assert rows.shape == (8, HEADS, DIM)
        assert (rows - expected).norm(dim=-1).max() < 0.02 * expected.norm(dim=-1).max()


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(kv_format="int5"), "kv_format is 'int5'; it must be one of"),
        (dict(keep_recent=-1), "keep_recent is -1; it must be 0 or more"),
        (dict(summary_slots=2), "given without evict"),
        (dict(evict=H2O(8), keep_recent=4), "give one of the two"),
        (dict(kv_format=["bf16", "fp16"]), "rows that are not codes have one dtype"),
        (dict(kv_fromat="int8"), "PagedCache has no option kv_fromat"),
        (dict(evict=PyramidKV(8, observed=2), kv_format=["int8", "auto"]), "must then be the same in all layers"),
        (dict(evict=L2Norm(8), low_rank=()), "chooses by keys"),
        (dict(evict=H2O(8), kv_format="int4"), "evict is given with kv_format 'int4', whose keys share scales"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(options, match, llama):
    with pytest.raises(ArgumentError, match=match):
        patch(llama, **options)
    assert llama.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(kv_format="mxfp4", low_rank="pairs"), "head_dim is 16; mxfp4 needs a multiple"),
        (dict(kv_format=["int8"] * 3), "kv_format has 3 entries for 2 layers"),
        (dict(kv_format=["int8"] * 3, evict=PyramidKV(20, observed=2)), "kv_format has 3 entries for 2 layers"),
        (dict(evict=PyramidKV(20, observed=2), low_rank="uneven"), "must then be the same in all layers"),
        (dict(low_rank=random_pairs(16)[:1]), "low_rank has 1 layers"),
        (dict(evict=SlidingWindow(8), prompt_lookup_num_tokens=2), "crop|in a cache that evicts"),  # who says it first
    ],
)
def test_what_a_cache_cannot_have_is_told_at_the_first_forward(options, match, llama):
    pairs = {"pairs": random_pairs(16), "uneven": [random_pairs(16)[0], random_pairs(8)[1]]}
    options = {name: pairs[value] if value in ("pairs", "uneven") else value for name, value in options.items()}
    lookup = {name: options.pop(name) for name in ("prompt_lookup_num_tokens",) if name in options}
    model = patch(llama, **options)
    try:
        with pytest.raises((ArgumentError, ValueError), match=match):
            generate(model, prompt((0,)), max_new_tokens=4, **lookup)
    finally:
        unpatch(llama)


def test_mla_takes_policies_by_position_only(deepseek):
    output = ours(deepseek, evict=StreamingLLM(64, positions="original"), kv_format="int8")
    assert_same(output, stock(deepseek, None, "int8/auto"))
    for options, match in (
        (dict(evict=H2O(8)), "would need keys of kv heads"),
        (dict(evict=StreamingLLM(8)), "MLA stores them turned"),
        (dict(low_rank=random_pairs(16)), r"low-rank row \(MLA\) already"),
    ):
        with pytest.raises(ArgumentError, match=match):
            ours(deepseek, rope_cos_sin=torch.zeros(64, 4), **options)
