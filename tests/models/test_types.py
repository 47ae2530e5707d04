"""Arguments of the layers' constructors that are of another type or size than they must be: told in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from kvbackend.cache import deepseek_v4_layers
from kvbackend.errors import ArgumentError
from kvbackend.models import (
    DeepseekV4Attention,
    DeepseekV32Attention,
    DeepseekV41Attention,
    DsaConfig,
    Role,
    SharedKvConfig,
    roles,
)

from ..cache.test_types import check_refusals

DSA = DsaConfig(
    softmax_scale=0.1, hidden_size=16, num_heads=2, q_lora_rank=8, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, index_heads=2, index_dim=16, index_topk=4,
)  # fmt: skip
SHARED = SharedKvConfig(
    hidden_size=16, num_heads=4, head_dim=32, rope_dim=8, q_lora_rank=8, o_groups=2, o_lora_rank=8, index_heads=2,
    index_dim=16, index_topk=4,
)  # fmt: skip
ROLE = Role(4, owns_rows=True, selects=True, makes_candidates=True)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "DsaConfig": (lambda **sizes: DeepseekV32Attention(DsaConfig(**sizes)), asdict(DSA)),
    "DsaConfig.layer": (DSA.layer, dict(selects=True, index_format="auto", latent_format="auto")),
    "DeepseekV32Attention": (DeepseekV32Attention, dict(config=DSA, selects=True)),
    "SharedKvConfig": (
        lambda **sizes: DeepseekV4Attention(SharedKvConfig(**sizes), deepseek_v4_layers([4], 16)[0]),
        asdict(SHARED),
    ),
    "DeepseekV4Attention": (DeepseekV4Attention, dict(config=SHARED, layer=deepseek_v4_layers([4], 16)[0])),
    "DeepseekV41Attention": (
        DeepseekV41Attention, dict(config=SHARED, role=ROLE, candidate_topk_blocks=4, candidate_block_size=8),
    ),
    "Role": (lambda **says: DeepseekV41Attention(SHARED, Role(**says)), asdict(ROLE)),
    "roles": (
        roles,
        dict(
            compress_ratios=[0, 4], kv_source_layer_ids=[1], index_source_layer_ids=[1], candidate_source_layer_id=1
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_values_of_any_type_are_taken_or_refused_in_words(name: str) -> None:
    check_refusals(*CALLS[name])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SharedKvConfig(num_heads=64, o_groups=7), "o_groups of SharedKvConfig is 7 for 64 heads"),
        (lambda: SharedKvConfig(rms_norm_eps=0.0), "rms_norm_eps of SharedKvConfig is 0.0; it must be above 0"),
        (lambda: DsaConfig(float("inf")), "softmax_scale of DsaConfig is inf; it must be above 0 and finite"),
        (lambda: Role(4, owns_rows=True), "owns_rows of Role is True and selects is False"),
        (lambda: Role(0, owns_rows=True, selects=True), "compress_ratio of Role is 0; it must be from 1"),
    ],
)
def test_sizes_that_do_not_go_together(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
