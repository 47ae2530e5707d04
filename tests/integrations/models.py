"""Tiny random models of many architectures, and what transformers' own eager attention makes of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

logging.set_verbosity_error()

PAD, NEW_TOKENS = 0, 64

_BASE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.2,  # with the usual 0.02 logits are nearly equal and greedy equality proves little
    tie_word_embeddings=False,  # tied, a random model repeats its last token
    pad_token_id=PAD,
    eos_token_id=None,
    bos_token_id=None,
)
_MIXED = ["sliding_attention", "full_attention"]
_MOE = dict(num_experts_per_tok=2, moe_intermediate_size=16)
_MLA = dict(
    num_key_value_heads=4,
    head_dim=4,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    **_MOE,
)
_YARN = dict(
    rope_type="yarn",
    factor=4.0,
    mscale=1.0,
    mscale_all_dim=0.7,
    original_max_position_embeddings=64,
    beta_fast=32,
    beta_slow=1,
    rope_theta=10000.0,
)

# name -> (model type, what differs from _BASE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, window": ("mistral", dict(sliding_window=4)),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2, softcap": ("gemma2", dict(sliding_window=5, attn_logit_softcapping=5.0)),
    "gemma3, mixed": ("gemma3_text", dict(sliding_window=4, layer_types=_MIXED)),
    "gpt-oss, sinks": ("gpt_oss", dict(sliding_window=4, num_local_experts=4, num_experts_per_tok=2)),
    "deepseek v2": ("deepseek_v2", dict(_MLA, topk_method="greedy")),
    "deepseek v3": ("deepseek_v3", _MLA),
    "deepseek v3, yarn": ("deepseek_v3", dict(_MLA, rope_parameters=_YARN)),
    "deepseek v3, half-split rope": ("deepseek_v3", dict(_MLA, rope_interleave=False)),
    "deepseek v3, no q_lora": ("deepseek_v3", dict(_MLA, q_lora_rank=None)),
}


def build(model_type: str, **options: Any) -> PreTrainedModel:
    """A random model in float32, the same each time."""
    config = AutoConfig.for_model(model_type, **{**_BASE, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in model.named_parameters():  # these start at 0, where a lost one would not show
        if "sinks" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.1)
    return model


@cache
def model_of(name: str) -> PreTrainedModel:
    model_type, options = MODELS[name]
    return build(model_type, **options)


def prompt(padding: tuple[int, ...] = (6, 0), length: int = 11) -> dict[str, Tensor]:
    """A batch with left padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, _BASE["vocab_size"], (len(padding), length), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = PAD, 0
    return dict(input_ids=ids, attention_mask=mask)


def generate(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None, **options: Any) -> Any:
    """Greedy decoding with logits."""
    settings = dict(max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return model.generate(**(inputs or prompt()), **{**settings, **options})


@cache
def eager(name: str, padding: tuple[int, ...] = (6, 0), **options: Any) -> Any:
    """What the unpatched model generates: to be asked for before the model is patched."""
    assert "_kvbackend" not in vars(model_of(name))
    return generate(model_of(name), prompt(padding), **options)


def cache_of(output: Any) -> Any:
    """The cache in an output of `generate` or of a forward, under either name."""
    return output.cache if "cache" in output else output.past_key_values
