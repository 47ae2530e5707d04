"""DeepSeek-V3's attention over its latent cache: the same tokens, from a fraction of the bytes.

    python examples/deepseek_latent_cache.py

The model is small and random; its attention has the published shapes but fewer heads.
"""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kvbackend.integrations.transformers import new_cache, patch

config = DeepseekV3Config(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    initializer_range=0.1,
    eos_token_id=None,
)
torch.manual_seed(0)
model = DeepseekV3ForCausalLM(config).eval()
prompt = torch.randint(1, 256, (1, 40))
settings = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, pad_token_id=0)
expected = model.generate(prompt, **settings)

patch(model)
cache = new_cache(model)
tokens = model.generate(prompt, **settings, cache=cache)

heads, nope, rope, value = 16, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
expanded = config.num_hidden_layers * heads * (nope + rope + value) * 4
print(f"same tokens as transformers' own cache: {torch.equal(tokens, expected)}")
print(f"bytes per token: {cache.pages.bytes_per_token:,} latent; {expanded:,} if keys and values were kept per head")
