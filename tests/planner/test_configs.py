"""Configs: the kind of attention that is read off the fields, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbackend.errors import ArgumentError
from kvbackend.planner import plan
from kvbackend.planner.configs import builtin, builtin_names, load

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
V41 = {
    "num_hidden_layers": 5, "head_dim": 512, "sliding_window": 128, "index_head_dim": 128, "index_topk": 512,
    "compress_ratios": [0, 2, 2, 1, 1, 0], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4],
}  # fmt: skip


@pytest.mark.parametrize("name", builtin_names())
def test_every_builtin_model_is_counted_and_sourced(name: str) -> None:
    model = builtin(name)
    assert model.source
    assert plan(model).bytes_per_token > 0
    if model.expert_parameters is not None and model.parameters is not None:
        assert 0.9 * model.parameters < model.expert_parameters < model.parameters


def test_names_in_any_case_with_an_organisation_and_aliases() -> None:
    assert builtin("deepseek-ai/DeepSeek-V3") == builtin("deepseek-v3")
    assert builtin("DeepSeek-R1") == builtin("deepseek-v3")


def test_llama_without_kv_heads_is_mha_with_the_usual_head_dim() -> None:
    model = load(LLAMA)
    assert (model.attention, model.query_heads, model.key_dim) == ("mha", 8, 64)
    assert plan(model).bytes_per_token == 4 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("fields", "attention", "per_token"),
    [
        ({"num_key_value_heads": 2}, "gqa", 4 * 2 * 2 * 64 * 2),
        ({"num_key_value_heads": 1}, "mqa", 4 * 2 * 1 * 64 * 2),
        ({"num_key_value_heads": 2, "dtype": "float32"}, "gqa", 4 * 2 * 2 * 64 * 4),
        ({"num_key_value_heads": 2, "torch_dtype": "float16"}, "gqa", 4 * 2 * 2 * 64 * 2),
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 8}, "mqa", 4 * 2 * 64 * 2),
        ({"num_key_value_heads": 2, "sliding_window": 8, "use_sliding_window": False}, "gqa", 4 * 2 * 2 * 64 * 2),
        ({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8}, "gqa", 0),
        ({"num_key_value_heads": 2, "sliding_window": 8, "sliding_window_pattern": 2}, "gqa", 2 * 2 * 2 * 64 * 2),
        ({"num_key_value_heads": 2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, "gqa",
         3 * 2 * 2 * 64 * 2),
    ],
)  # fmt: skip
def test_heads(fields: dict[str, object], attention: str, per_token: int) -> None:
    made = plan(LLAMA | fields)
    assert (made.model.attention, made.bytes_per_token) == (attention, per_token)


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    assert plan({"model_type": "vision", "text_config": LLAMA}).bytes_per_token == plan(LLAMA).bytes_per_token


def test_v4_in_both_spellings() -> None:
    shared = {"num_hidden_layers": 3, "head_dim": 512, "sliding_window": 128, "index_head_dim": 128, "index_topk": 512}
    ratios = plan(shared | {"compress_ratios": [0, 4, 128, 0]})
    names = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    types = plan(shared | {"layer_types": names, "compress_rates": {names[1]: 4, names[2]: 128}})
    assert ratios.bytes_per_token == types.bytes_per_token == (584 + 68) / 4 + 584 / 128
    assert [layer.layer.kind for layer in types.cache.layers] == ["swa", "csa", "hca"]


def test_v41_layers_own_reindex_or_reuse() -> None:
    made = plan(V41)
    kinds = [layer.layer.kind for layer in made.cache.layers]
    assert kinds == ["swa", "csa2 full", "csa2 reuse", "csa2 full", "csa2 reindex"]
    assert made.bytes_per_token == (288 + 68) / 2 + (288 + 68)


def test_widths_that_no_record_has_are_native_in_bf16() -> None:
    made = plan(V41 | {"head_dim": 64, "index_head_dim": 32})
    assert made.bytes_per_token == 1.5 * (64 + 32) * 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ("num_hidden_layers", "num_key_value_heads", "head_dim")),
        (LLAMA | {"model_type": "new"}, ("num_key_value_heads", "head_dim")),
        (LLAMA | {"num_hidden_layers": 0}, ("num_hidden_layers", "is 0")),
        (LLAMA | {"num_hidden_layers": "four"}, ("'four'", "whole number")),
        (LLAMA | {"num_key_value_heads": 3}, ("is 3", "8 attention heads")),
        (LLAMA | {"sliding_window": 8}, ("layer_types",)),
        (LLAMA | {"layer_types": ["linear_attention"] * 4}, ("linear_attention", "full_attention")),
        (LLAMA | {"layer_types": ["full_attention"] * 3}, ("3 entries", "4 layers")),
        (LLAMA | {"num_kv_shared_layers": 2}, ("num_kv_shared_layers = 2",)),
        (LLAMA | {"is_encoder_decoder": True}, ("is_encoder_decoder",)),
        (LLAMA | {"max_position_embeddings": -1}, ("max_position_embeddings",)),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512}, ("qk_rope_head_dim",)),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 8}, ("index_head_dim",)),
        (V41 | {"compress_ratios": [0, 2]}, ("2 entries", "5 layers")),
        (V41 | {"kv_source_layer_ids": [3]}, ("layer 1", "source")),
        ({k: v for k, v in V41.items() if "source" not in k}, ("also 1", "0, 4 or 128")),
        ({k: v for k, v in V41.items() if k != "sliding_window"}, ("sliding_window",)),
        ({"num_hidden_layers": 1, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "layer_types": ["linear_attention"]},
         ("linear_attention",)),
    ],
)  # fmt: skip
def test_refusals_name_the_fields(config: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        load(config)
    assert all(word in str(caught.value) for word in words), caught.value


def test_files_and_folders(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert load(file).name == load(str(tmp_path)).name == tmp_path.name
    assert load(tmp_path).weights_bytes is None
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert load(tmp_path).weights_bytes == 100
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 2000}}')
    assert load(tmp_path).weights_bytes == 2000


@pytest.mark.parametrize(("text", "word"), [("{", "no JSON"), ("[1]", "list")])
def test_files_that_are_no_config(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=word):
        load(file)


def test_names_and_folders_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="llama-3-8b"):
        load("llama-9")
    with pytest.raises(ArgumentError, match=r"without config\.json"):
        load(tmp_path)


TRANSFORMERS = {
    "LlamaConfig": ("mha", 524288), "GPT2Config": ("mha", 36864), "FalconConfig": ("mqa", 8192),
    "GptOssConfig": ("gqa", 36864), "DeepseekV3Config": ("mla", 70272), "DeepseekV32Config": ("mla+dsa", 48068),
    "GlmMoeDsaConfig": ("mla+dsa", 61464),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_default_configs_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    made = plan(getattr(transformers, name)().to_dict())
    assert (made.model.attention, made.bytes_per_token) == TRANSFORMERS[name]


@pytest.mark.parametrize("name", ["MambaConfig", "JambaConfig", "Gemma3nTextConfig", "KimiLinearConfig", "T5Config"])
def test_other_architectures_of_transformers_are_refused(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    with pytest.raises(ArgumentError):
        load(getattr(transformers, name)().to_dict())
