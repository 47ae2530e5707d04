"""Frequencies and YaRN against published constants, transformers and arbitrary-precision arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from kvbackend import ArgumentError
from kvbackend.rope import Yarn, cos_sin_table, inv_freq, softmax_scale, yarn_mscale

DEEPSEEK_V3 = 1e4, Yarn(40, 4096, mscale=1, mscale_all_dim=1)
DEEPSEEK_V4 = 1.6e5, Yarn(16, 65536, mscale=0, mscale_all_dim=0)
KIMI_K2 = 5e4, Yarn(64, 4096, beta_fast=1, beta_slow=1, mscale=1, mscale_all_dim=1)


@pytest.mark.parametrize(
    ("model", "ramp", "golden"),
    [
        (DEEPSEEK_V3, (10, 23), [1, 0.1, 0.0055, 2.5e-05, 3.3338036e-06]),
        (DEEPSEEK_V4, (15, 25), [1, 0.05, 0.002265625, 1.953125e-05, 5.680529e-07]),
        (KIMI_K2, (19, 20), [1, 0.06687403, 0.004472136, 4.6729649e-06, 4.3822065e-07]),
    ],
    ids=["DeepSeek-V3", "DeepSeek-V4", "Kimi-K2"],
)
def test_yarn_frequencies_of_models(model, ramp, golden):
    base, yarn = model
    assert yarn.correction_range(64, base) == ramp
    got = inv_freq(64, base, yarn)[[0, 8, 16, 24, 31]].tolist()
    assert got == pytest.approx(golden, rel=2e-8)


@pytest.mark.parametrize(
    ("dims", "yarn", "golden"),
    [
        (192, DEEPSEEK_V3[1], 0.1352338),
        (192, Yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707), 0.1147214),
        (192, Yarn(32, 4096, mscale=1, mscale_all_dim=1), 0.1308608),
        (192, KIMI_K2[1], 0.1446796),
        (512, DEEPSEEK_V4[1], 512**-0.5),
        (128, None, 128**-0.5),
    ],
)
def test_softmax_scale_of_models(dims, yarn, golden):
    assert softmax_scale(dims, yarn) == pytest.approx(golden, abs=5e-8)


def test_mscale():
    assert yarn_mscale(40) == pytest.approx(1.36889, abs=5e-6)
    assert yarn_mscale(40, 0.707) == pytest.approx(1.26080, abs=5e-6)
    assert yarn_mscale(1) == yarn_mscale(0.5) == 1
    assert DEEPSEEK_V3[1].table_scale == 1
    assert Yarn(40, 4096).table_scale == yarn_mscale(40), "without mscale_all_dim, cos and sin carry it all"


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    base, yarn = DEEPSEEK_V3
    plain, scaled = inv_freq(64, base), inv_freq(64, base, yarn)
    low, high = yarn.correction_range(64, base)
    assert torch.equal(scaled[: low + 1], plain[: low + 1])
    torch.testing.assert_close(scaled[high:], plain[high:] / 40, rtol=1e-15, atol=0)
    between = scaled[low + 1 : high]
    assert (between < plain[low + 1 : high]).all()
    assert (between > plain[low + 1 : high] / 40).all()


def test_factor_one_changes_nothing():
    assert torch.equal(inv_freq(64, 1e4, Yarn(1, 4096)), inv_freq(64, 1e4))
    assert torch.equal(cos_sin_table(9, 64, 1e4, Yarn(1, 4096)), cos_sin_table(9, 64, 1e4))


def test_table_holds_cosines_then_sines_times_the_scale():
    yarn = Yarn(8, 512, mscale=0.9)
    table = cos_sin_table(50, 6, 1e3, yarn, dtype=torch.float64)
    assert table.shape == (50, 6)
    for pair, frequency in enumerate(inv_freq(6, 1e3, yarn).tolist()):
        for position in (0, 1, 49):
            assert table[position, pair] == pytest.approx(math.cos(position * frequency) * yarn.table_scale, abs=1e-15)
            assert table[position, 3 + pair] == pytest.approx(
                math.sin(position * frequency) * yarn.table_scale, abs=1e-15
            )
    assert cos_sin_table(0, 6, 1e3).shape == (0, 6)
    assert cos_sin_table(3, 6, 1e3, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert cos_sin_table(3, 6, 1e3, device="meta").device.type == "meta"


def test_last_of_a_million_positions_is_exact():
    mpmath = pytest.importorskip("mpmath", reason="mpmath, which comes with torch, is absent")
    position, dims = 2**20 - 1, 64
    with mpmath.workdps(40):
        angles = [position * mpmath.mpf(10000) ** (-mpmath.mpf(2 * i) / dims) for i in range(dims // 2)]
        want = torch.tensor(
            [float(f(angle)) for f in (mpmath.cos, mpmath.sin) for angle in angles], dtype=torch.float64
        )
    table = cos_sin_table(2**20, dims, 1e4)
    # half a unit in float32's last place; the angle itself is right to 2e-10
    assert (table[position].double() - want).abs().max() <= 2**-25 + 3e-10


@pytest.mark.parametrize(
    ("dims", "scaling"),
    [
        (64, dict(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)),
        (64, dict(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.5)),
        (128, dict(factor=4.0, original_max_position_embeddings=32768)),
        (64, dict(factor=64.0, original_max_position_embeddings=4096, beta_fast=1.0, beta_slow=1.0)),
        (16, dict(factor=4.0, original_max_position_embeddings=64)),
        (16, dict(factor=4.0, original_max_position_embeddings=2**17)),  # a ramp that ends beyond the last pair
        (16, dict(factor=4.0, original_max_position_embeddings=2**17, beta_slow=1e-4)),  # and one cut at rotary_dim - 1
    ],
)
def test_equals_transformers_yarn(dims, scaling):
    transformers = pytest.importorskip("transformers", reason="transformers is absent: no outside implementation")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(scaling, rope_type="yarn", rope_theta=1e4)
    config = transformers.LlamaConfig(
        hidden_size=dims, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=1 << 20,
        rope_parameters=parameters,
    )  # fmt: skip
    want, scale = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    yarn = Yarn(**scaling)
    # theirs is float32
    torch.testing.assert_close(inv_freq(dims, 1e4, yarn), want.double(), rtol=3e-7, atol=1e-10)
    assert yarn.table_scale == pytest.approx(scale, rel=1e-15)


def test_equals_transformers_default_table():
    pytest.importorskip("transformers", reason="transformers is absent: no outside implementation")
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, num_key_value_heads=1,
        rope_parameters=dict(rope_type="default", rope_theta=5e5),
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(100)[None])
    want = torch.cat((cos[0, :, :32], sin[0, :, :32]), -1)
    # their angles are float32: 100 * 2**-24 apart
    torch.testing.assert_close(cos_sin_table(100, 64, 5e5), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rotary_dim", [0, 3, -2])
def test_refuses_what_are_no_pairs(rotary_dim):
    with pytest.raises(ArgumentError, match=f"rotary_dim is {rotary_dim}; .*even and positive"):
        inv_freq(rotary_dim, 1e4)
