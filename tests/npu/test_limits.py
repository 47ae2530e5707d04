"""Every documented limit, violated on purpose: the predicate refuses, in words, and so does the vendor's model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvbackend import ArgumentError
from kvbackend.backends.limits import OneOf, Steps
from kvbackend.backends.npu import vendor_ops
from kvbackend.backends.npu.limits import Limit, VendorOp
from kvbackend.backends.npu.target import FAMILIES
from tests.npu import cases, judge, vendor
from tests.npu.violations import TOO_LARGE_FOR_HOST, WALK, walk

META = torch.device("meta")
VIOLATIONS = [
    pytest.param(op, family, limit, value, id=f"{op.name}-{family}-{limit.name}-{value}")
    for family in FAMILIES
    for op, limit, value in walk(family)
]


@pytest.mark.parametrize(("vendor_op", "family", "limit", "value"), VIOLATIONS)
def test_a_violated_limit_is_refused_before_torch_npu_is_called(
    vendor_op: VendorOp, family: str, limit: Limit, value: Any, become
) -> None:
    for op, sizes in WALK[vendor_op.name, limit.name]:
        double = become(family)
        try:
            found = judge.reasons(op, getattr(cases, op)(device=META, **sizes(value)))
        except ArgumentError:  # no backend takes such a call
            continue
        of_limit = [reason for reason in found if vendor_op.name in reason and str(limit.rule) in reason]
        assert of_limit, found
        assert all(re.match(r"[^;]+ \S+; .+ takes .+ on Ascend.+ \(.+\): .+", reason) for reason in of_limit)
        assert not double.calls
        if limit.name not in TOO_LARGE_FOR_HOST:  # forced past the predicate, the vendor's model rejects it too
            with pytest.raises(vendor.RejectedError):
                judge.run(op, getattr(cases, op)(**sizes(value)))


def test_every_limit_is_walked() -> None:
    assert set(WALK) == {(op.name, limit.name) for op in vendor_ops.ALL for limit in op.limits}


def test_the_values_at_the_limits_are_taken(become) -> None:
    """A predicate that refused everything would pass the walk."""
    for op in vendor_ops.ALL:
        for family in FAMILIES:
            for limit in op.limits:
                if family not in op.cann or family not in limit.families:
                    continue
                become(family)
                rule = limit.rule.steps if not isinstance(limit.rule, (OneOf, Steps)) else limit.rule
                edges = (
                    rule.values
                    if isinstance(rule, OneOf)
                    else (max(rule.low, rule.step), rule.high - rule.high % rule.step)
                )
                for edge in edges:
                    assert not list(op.refuse(limit.name, edge, "", ""))


def strided(call: cases.Call, name: str) -> cases.Call:
    return call | {name: torch.stack((call[name],) * 2, -1)[..., 0]}


REFUSED_OPTIONS: list[tuple[str, str, Callable[[], cases.Call]]] = [
    ("reshape_and_cache", "key_cache is strided", lambda: strided(cases.reshape_and_cache(), "key_cache")),
    ("reshape_and_cache", "value_cache is strided", lambda: strided(cases.reshape_and_cache(), "value_cache")),
    ("concat_and_cache_mla", "ckv_cache is strided", lambda: strided(cases.concat_and_cache_mla(), "ckv_cache")),
    ("store_rows", "cache is strided", lambda: strided(cases.store_rows(), "cache")),
    ("gather_cache", "cache is strided", lambda: strided(cases.gather_cache(), "cache")),
    ("gather_cache", "seq_starts is given", lambda: cases.gather_cache() | {"seq_starts": torch.tensor([0, 4]).int()}),
    ("gather_cache", "out_format is 'fp32'", lambda: cases.gather_cache() | {"out_format": "fp32"}),
    ("paged_attention", "key_cache is strided", lambda: strided(cases.paged_attention(), "key_cache")),
    ("paged_attention", "value_cache has 128 dims and q 64", lambda: cases.paged_attention(value_dim=128)),
    ("paged_attention", "window is 3", lambda: cases.paged_attention(window=3)),
    ("paged_attention", "softcap is 2.0", lambda: cases.paged_attention(softcap=2.0)),
    (
        "paged_attention",
        "key_positions is given",
        lambda: cases.paged_attention(key_positions=torch.zeros(12, 128).int()),
    ),
    ("paged_attention", "rope_cos_sin is given", lambda: cases.paged_attention(rope_cos_sin=torch.zeros(200, 64))),
    ("paged_attention", "key_bias is given", lambda: cases.paged_attention(key_bias=torch.zeros(12, 128, 2))),
    (
        "paged_attention",
        "return_lse is True with sinks",
        lambda: cases.paged_attention(sink_dtype=torch.bfloat16, return_lse=True),
    ),
    ("mla_attention", "ckv_cache is strided", lambda: strided(cases.mla_attention(), "ckv_cache")),
    ("mla_attention", "kpe_cache is strided", lambda: strided(cases.mla_attention(), "kpe_cache")),
    ("mla_attention", "return_lse is True", lambda: cases.mla_attention(return_lse=True)),
    ("sparse_mla_attention", "ckv_cache is strided", lambda: strided(cases.sparse_mla_attention(), "ckv_cache")),
    ("sparse_mla_attention", "return_lse is True", lambda: cases.sparse_mla_attention(return_lse=True)),
    (
        "sparse_mla_attention",
        "chooses 0 tokens",
        lambda: cases.sparse_mla_attention(topk_indices=torch.zeros(4, 0).int()),
    ),
    ("sparse_mla_attention", "kv_format is 'v32_fp8_656'", lambda: cases.sparse_mla_attention(kv_format="v32_fp8_656")),
    ("lightning_indexer", "key_cache is strided", lambda: strided(cases.lightning_indexer(), "key_cache")),
    ("lightning_indexer", "order is 'score'", lambda: cases.lightning_indexer(order="score")),
    (
        "lightning_indexer",
        "cann_ops_transformer.lightning_indexer has nothing of the kind",
        lambda: cases.lightning_indexer(compress_ratio=4, candidates=torch.zeros(3, 1).int()),
    ),
    (
        "lightning_indexer",
        "kv_format is 'index_fp8_132'",
        lambda: (
            cases.lightning_indexer(num_heads=32)
            | dict(key_cache=torch.zeros(8, 132 * 16).byte(), kv_format="index_fp8_132", compress_ratio=4)
        ),
    ),
    (
        "shared_kv_attention",
        "window_cache is strided",
        lambda: strided(cases.shared_kv_attention(), "window_cache"),
    ),
    (
        "shared_kv_attention",
        "compressed_cache is strided",
        lambda: strided(cases.shared_kv_attention(), "compressed_cache"),
    ),
    (
        "shared_kv_attention",
        "kv is given",
        lambda: cases.shared_kv_attention(record="v4_fp8_608_ascend", written=False),
    ),
    (
        "shared_kv_attention",
        "pages hold v4_fp8_640_ascend",
        lambda: cases.shared_kv_attention(record="v4_fp8_640_ascend"),
    ),
    (
        "shared_kv_attention",
        "pages hold v4_fp8_608_ascend and v4_fp8_584_ascend",
        lambda: (
            cases.shared_kv_attention(record="v4_fp8_608_ascend")
            | dict(compressed_cache=torch.zeros(8, 584 * 16).byte(), kv_format="v4_fp8_584_ascend")
        ),
    ),
    (
        "store_rows",
        "kv_format is 'v4_fp8_608_ascend'",
        lambda: dict(
            rows=torch.zeros(2, 512).bfloat16(),
            cache=torch.zeros(2, 608 * 4).byte(),
            slot_mapping=torch.tensor([0, 1]),
            kv_format="v4_fp8_608_ascend",
        ),
    ),
    ("lightning_indexer", "candidates is given", lambda: cases.lightning_indexer(candidates=torch.zeros(3, 1).int())),
    ("lightning_indexer", "weights are torch.float16", lambda: cases.lightning_indexer(weights_dtype=torch.float16)),
    ("absorb_q", "w_uk is strided", lambda: strided(cases.absorb_q(), "w_uk")),
    (
        "merge_attn_states",
        "outs is empty",
        lambda: cases.merge_attn_states() | {"outs": torch.zeros(2, 0, 2, 16), "lses": torch.zeros(2, 0, 2)},
    ),
]


@pytest.mark.parametrize(
    ("op", "words", "call"), REFUSED_OPTIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_the_vendor_op_lacks_is_refused(op, words, call, become) -> None:
    double = become("950DT")
    found = [reason for reason in judge.reasons(op, call()) if words in reason]
    assert found
    assert all(re.match(r"[^;]+; .+: .+", reason) for reason in found), found
    assert not double.calls
