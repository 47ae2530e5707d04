"""Bytes against published numbers: papers, reports, and the layouts that engines use. Every number is exact."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvbackend.planner import Plan, plan

GIB = 1 << 30


def shape(layers: int, heads: int, dim: int, query_heads: int | None = None) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "head_dim": dim,
        "num_attention_heads": query_heads or heads,
        "dtype": "float16",
    }


def latent(layers: int) -> dict[str, object]:
    return {"num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "scheme", "per_token", "gib_at_8k", "gib_at_1m"),
    [
        ("llama-2-7b", "bf16", 524288, 4.0, 512),
        ("deepseek-67b", "bf16", 389120, 2.96875, 380),
        ("llama-3-8b", "bf16", 131072, 1.0, 128),
        ("llama-3-70b", "bf16", 327680, 2.5, 320),
        ("qwen3-8b", "bf16", 147456, 1.125, 144),
        ("deepseek-v2-lite", "bf16", 31104, 0.237, 30.375),
        ("deepseek-v2", "bf16", 69120, 0.527, 67.5),
        ("deepseek-v3", "bf16", 70272, 0.536, 68.625),
        ("deepseek-r1", "native", 70272, 0.536, 68.625),
        ("kimi-k2-instruct", "native", 70272, 0.536, 68.625),
        ("kimi-k2-instruct-0905", "native", 70272, 0.536, 68.625),
        ("deepseek-v3", "v32_fp8_656", 40016, None, None),
        ("deepseek-v3", "fp8_e4m3", 61 * (512 + 64 * 2), None, None),  # the rotary part stays in bf16
        ("deepseek-v3", "mxfp4", 61 * (512 // 2 + 16 + 64 * 2), None, None),
        ("deepseek-v3.2", "native", 48068, 0.367, 46.941),
        ("deepseek-v3.2", "bf16", 61 * (1152 + 132), None, None),
        ("glm-5", "native", 61464, 0.469, 60.023),
        ("deepseek-v4-flash", "native", 3514.25, 0.027, 3.432),
        ("deepseek-v4-flash", "v4_fp8_584+index_fp8_132", 3850.25, 0.029, 3.760),
        ("deepseek-v4-flash", "v4_fp8_640_ascend", 4153, 0.032, 4.056),
        ("deepseek-v4-flash-0731", "native", 3514.25, 0.027, 3.432),
        ("deepseek-v4-pro", "native", 5031.4375, 0.038, 4.914),
        ("deepseek-v4-pro", "v4_fp8_584+index_fp8_132", 5511.4375, None, None),
        ("deepseek-v4-pro", "bf16", 9848, None, 9.617),
        ("deepseek-v4.1-flash", "native", 890, 0.007, 0.869),
        ("deepseek-v4.1-flash", "v41_fp4_288+index_fp8_132", 1050, None, None),
        ("deepseek-v4.1-flash", "v41_fp8_528", 1650, 0.013, 1.611),
        ("deepseek-v4.1-flash", "v41_fp8_528+index_mxfp4_68", 1490, None, 1.455),
        ("deepseek-v4.1-flash", "v4_fp8_584", 1790, 0.014, 1.748),
        ("deepseek-v4.1-flash", "bf16", 3200, None, 3.125),
        ("deepseek-v4.1-flash", "bf16+index_int8_130", 2885, None, 2.817),
    ],
)
def test_models(model: str, scheme: str, per_token: float, gib_at_8k: float | None, gib_at_1m: float | None) -> None:
    made = plan(model, kv_format=scheme)
    assert made.bytes_per_token == Fraction(per_token)
    for tokens, gib in ((8192, gib_at_8k), (1 << 20, gib_at_1m)):
        if gib is not None:
            assert float(made.bytes_per_token * tokens / GIB) == pytest.approx(gib, abs=6e-4)
            assert made.bytes_at(tokens) == made.bytes_per_token * tokens + made.fixed_bytes_per_sequence


@pytest.mark.parametrize(
    ("config", "scheme", "per_token"),
    [
        # MHA, GQA-8, MQA and MLA at 30 layers: 480, 120, 15 and 33.75 KiB; MLA has no factor 2
        (shape(30, 32, 128), "native", 491520),
        (shape(30, 8, 128, 32), "native", 122880),
        (shape(30, 1, 128, 32), "native", 15360),
        (latent(30), "native", 34560),
        (latent(48), "native", 55296),
        # 7B: K and V, 512 KiB; 70B as MHA and as it is
        (shape(32, 32, 128), "native", 512 << 10),
        (shape(80, 64, 128), "native", 2621440),
        # 61 layers of GQA-8: FP16, and the scales that 4 bits need
        (shape(61, 8, 128), "native", 249856),
        (shape(61, 8, 128), "nvfp4", Fraction(249856 * 9, 32)),
        (shape(61, 8, 128), "mxfp4", Fraction(249856 * 17, 64)),
        (shape(61, 8, 128), "fp8_e4m3", 124928),
        (shape(32, 8, 128), "int8", 67584),
        (shape(32, 8, 128), "int4:64", 36864),
        (shape(32, 8, 128), "int8/int4", 32 * 8 * (132 + 80)),
        # the hypothetical MHA of DeepSeek-V2 is 71.1 times its MLA row
        ({**shape(60, 128, 192), "v_head_dim": 128}, "native", 60 * 128 * (192 + 128) * 2),
    ],
)
def test_shapes(config: dict[str, object], scheme: str, per_token: int) -> None:
    assert plan(config, kv_format=scheme).bytes_per_token == per_token


@pytest.mark.parametrize(
    ("config", "scheme", "tokens", "sequences", "gib"),
    [
        (shape(30, 32, 128), "native", 8192, 1, 3.75),
        (shape(30, 32, 128), "native", 32768, 1, 15),
        (shape(30, 32, 128), "native", 8192, 8, 30),
        (latent(30), "native", 8192, 1, 0.263671875),
        (shape(32, 32, 128), "native", 8192, 8, 32),
        (shape(32, 32, 128), "native", 131072, 8, 512),
        (shape(32, 32, 128), "native", 32768, 1, 16),
        (shape(32, 8, 128), "native", 32768, 1, 4),
        (shape(80, 64, 128), "native", 8192, 1, 20),
        (shape(80, 64, 128), "native", 8192, 16, 320),
        (shape(80, 8, 128), "native", 8192, 16, 40),
        (shape(32, 8, 128), "native", 8192, 8, 8),
        (latent(48), "native", 8192, 8, 3.375),
        (latent(48), "native", 131072, 1, 6.75),
        (shape(61, 8, 128), "native", 131072, 1, 30.5),
        (shape(61, 8, 128), "native", 131072, 8, 244),
        (shape(61, 8, 128), "native", 32768, 16, 122),
        (shape(61, 8, 128), "nvfp4", 131072, 1, 8.578125),
        (shape(61, 8, 128), "mxfp4", 131072, 1, 8.1015625),
        (shape(61, 8, 128), "fp8_e4m3", 32768, 1, 3.8125),
        (shape(61, 8, 128), "fp8_e4m3", 32768, 16, 61),
    ],
)
def test_sizes_that_articles_get_wrong(
    config: dict[str, object], scheme: str, tokens: int, sequences: int, gib: float
) -> None:
    assert plan(config, kv_format=scheme).bytes_at(tokens) * sequences == Fraction(gib) * GIB


@pytest.mark.parametrize(("config", "fitting"), [(shape(30, 32, 128), 10), (latent(30), 151)])
def test_sequences_in_40_gib(config: dict[str, object], fitting: int) -> None:
    made = plan(config, memory="40GiB", margin=0, activations=0, context=8192)
    assert made.max_sequences == fitting


@pytest.mark.parametrize(
    ("model", "scheme", "window", "states"),
    [
        ("deepseek-v4-flash", "native", 3214336, 21 * (65536 + 16384) + 20 * 524288),
        ("deepseek-v4-pro", "native", 4559872, 18710528),
        ("deepseek-v4.1-flash", "native", 2703360, 98304),
        ("deepseek-v4.1-flash", "bf16", 5242880, 98304),
        ("deepseek-v4.1-flash", "v4_fp8_584", 2990080, 98304),
    ],
)
def test_fixed_bytes_per_sequence(model: str, scheme: str, window: int, states: int) -> None:
    made = plan(model, kv_format=scheme)
    assert made.cache.state_bytes == states
    assert made.fixed_bytes_per_sequence == window + states


def test_v41_at_1k_is_mostly_fixed() -> None:
    made = plan("deepseek-v4.1-flash")
    assert made.bytes_at(1024) == 890 * 1024 + 2703360 + 98304


@pytest.mark.parametrize(
    ("tokens", "index_bytes"),
    [(1 << 15, 2.5 * 32768 * 68 + 4 * 16384 * 68), (1 << 20, 2.5 * (1 << 20) * 68 + 4 * 16384 * 68)],
)
def test_v41_reads_per_decode_step(tokens: int, index_bytes: float) -> None:
    attention = 38 * (128 * 528 + 512 * 288) + 2 * 128 * 528
    assert plan("deepseek-v4.1-flash").cache.read_bytes_at(tokens) == attention + index_bytes


def test_dsa_reads_what_it_selects_and_every_index_key() -> None:
    made = plan("deepseek-v3.2")
    assert made.cache.read_bytes_at(1000) == 61 * 1000 * (656 + 132)
    assert made.cache.read_bytes_at(1 << 16) == 61 * (2048 * 656 + (1 << 16) * 132)


def test_selected_rows_are_counted_once_where_some_are_in_full_precision() -> None:
    made = plan("deepseek-v3.2", kv_format="native,recent=64")
    assert made.cache.read_bytes_at(1 << 16) == 61 * (2048 * 656 + (1 << 16) * 132)
    kept = 64 + made.cache.block_size - 1  # at most
    assert made.cache.read_bytes_at(kept + 100) == 61 * (kept * 1152 + 100 * 656 + (kept + 100) * 132)


def test_a_glm_layer_that_shares_an_indexer_keeps_no_keys() -> None:
    config = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    config |= {"index_topk": 2048, "indexer_types": ["full", "shared", "shared", "full"]}
    assert plan(config).bytes_per_token == 4 * 656 + 2 * 132


def test_pages_of_the_v4_record_hold_padding() -> None:
    made = plan("deepseek-v4-flash", block_size=256)
    page = 21 * (37440 + 64 * 68) + 20 * 1728
    assert made.allocated_bytes_per_token == Fraction(page, 256)
    assert made.cache.pool_bytes(1000) == 1000 * page


def test_the_last_block_of_a_sequence_counts_whole() -> None:
    made = plan("llama-3-8b", block_size=16)
    waste = made.allocated_bytes_at(8192 + 1) - made.bytes_at(8192 + 1)
    assert waste == 15 * 131072
    assert made.allocated_bytes_per_token == made.bytes_per_token == 131072


def test_low_rank_by_ratio_list() -> None:
    halved = plan("llama-3-8b", kv_format="bf16,ratios=1/1/2/2/4/4/4/4")
    assert halved.bytes_per_token == 131072 // 2
    assert plan("llama-3-8b", kv_format="bf16,rank=32").bytes_per_token == 131072 // 4
    stacked = plan("llama-3-8b", kv_format="mxfp4,rank=32").bytes_per_token
    assert 131072 / stacked == Fraction(4 * 16 * 4, 17)


def test_formats_per_layer() -> None:
    made = plan("llama-3-8b", kv_format="fp8_e4m3,0-7=nvfp4,31=bf16")
    sizes = [layer.per_token for layer in made.cache.layers]
    assert sizes[0] == sizes[7] == 1152
    assert sizes[8] == sizes[30] == 2048
    assert sizes[31] == 4096


def test_a_recent_window_and_sinks_are_in_bf16_besides() -> None:
    made = plan("llama-3-8b", kv_format="int8,recent=124,sinks=4", block_size=16)
    full, small = 131072, 67584
    assert made.bytes_at(100) == 100 * (full + small)
    assert made.bytes_at(1000) == (124 + 15 + 16) * full + 1000 * small  # whole blocks, wherever they end
    assert made.allocated_bytes_at(1000) == (9 + 1) * 16 * full + 1008 * small
    assert made.bytes_per_token == small


def test_kivi_leaves_open_blocks_in_bf16() -> None:
    made = plan("llama-3-8b", kv_format="int4")
    assert made.cache.block_size == 32
    assert made.bytes_at(1000) == (32 + 32) * 131072 + 1000 * 40960
    inside = plan("llama-3-8b", kv_format="int4,recent=128")
    assert inside.bytes_at(1000) == (128 + 31 + 32) * 131072 + 1000 * 40960


def test_eviction_replaces_the_tokens() -> None:
    kept = plan("llama-3-8b", kv_format="int8,keep=4096,recent=128", block_size=16)
    assert kept.bytes_per_token == 0
    assert kept.bytes_at(1 << 17) == kept.bytes_at(4096) == (128 + 15) * 131072 + 4096 * 67584
    assert plan("llama-3-8b", kv_format="bf16,keep=25%").bytes_at(8192) == 2048 * 131072


def test_a_sliding_window_is_fixed_bytes_and_one_page_more() -> None:
    config = shape(2, 8, 128) | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    made = plan(config, block_size=16)
    row = 4096
    assert made.bytes_per_token == row
    assert made.fixed_bytes_per_sequence == 128 * row
    assert made.allocated_bytes_at(1 << 14) == (1 << 14) * row + 9 * 16 * row


def test_k_and_v_of_different_width() -> None:
    made = plan(shape(1, 4, 192) | {"v_head_dim": 128})
    assert made.bytes_per_token == 4 * (192 + 128) * 2


def _formula_value(text: str) -> float:
    left = text.split(" = ")[0].replace(" x ", " * ")
    for word in ("full", "mla", "dsa", "hca", "csa2", "csa", "layers"):
        left = left.replace(f" {word}", "")
    return float(eval(left, {"__builtins__": {}}))


@pytest.mark.parametrize("scheme", ["native", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3", "deepseek-v3.2", "deepseek-v4-flash"])
def test_the_formula_computes_to_the_bytes(model: str, scheme: str) -> None:
    made: Plan = plan(model, kv_format=scheme)
    assert _formula_value(made.formula()) == made.bytes_per_token
