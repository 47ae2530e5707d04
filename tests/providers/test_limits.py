"""Every limit of a library's function, violated on purpose: the predicate refuses, in words that name the source."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from kvbackend import UnsupportedError
from kvbackend.backends.flashinfer import conventions, planned
from kvbackend.backends.nvidia import Function, Limit
from tests.npu import cases as plain
from tests.providers import cases, judge

Call = dict[str, Any]
PREFILL = dict(q_lens=(40, 9), seq_lens=(130, 9))


def mla(**sizes: Any) -> Call:
    return cases.fused(plain.mla_attention(**{"mla_block_size": 64, "num_blocks": 3, **sizes}))


def sparse(**sizes: Any) -> Call:
    return cases.fused(plain.sparse_mla_attention(**sizes))


def records(dtype: torch.dtype = torch.bfloat16, num_heads: int = 4) -> Call:
    return cases.sparse_mla_attention(dtype, kv_format="v32_fp8_656", num_heads=num_heads)


def index(dtype: torch.dtype = torch.float8_e4m3fn, num_heads: int = 32, block_size: int = 64, **more: Any) -> Call:
    call = cases.indexer_logits(torch.bfloat16, block_size=block_size, heads=num_heads, **more)
    return call | dict(q=call["q"].to(dtype))


def paged(**sizes: Any) -> Call:
    return cases.paged_attention(**{"dtype": torch.bfloat16, "q_lens": (1,), "seq_lens": (9,), **sizes})


def prompt(**sizes: Any) -> Call:
    return paged(num_blocks=30, **sizes, **PREFILL)


def mla_prompt(**sizes: Any) -> Call:
    return plain.mla_attention(num_blocks=30, **sizes, **PREFILL)


def merge(**sizes: Any) -> Call:
    return plain.merge_attn_states(**{"value_dim": 64, **sizes})


# (provider, function, limit) -> the op, and a call with a given value of the property
WALK: dict[tuple[str, str, str], tuple[str, Callable[[Any], Call]]] = {
    ("flash_mla", "DENSE_DECODE", "dtype"): ("mla_attention", lambda value: mla(dtype=value)),
    ("flash_mla", "DENSE_DECODE", "rank"): ("mla_attention", lambda value: mla(mla_rank=value)),
    ("flash_mla", "DENSE_DECODE", "rope_dim"): ("mla_attention", lambda value: mla(mla_rope_dim=value)),
    ("flash_mla", "DENSE_DECODE", "block_size"): ("mla_attention", lambda value: mla(mla_block_size=value)),
    ("flash_mla", "DENSE_DECODE", "num_heads"): ("mla_attention", lambda value: mla(mla_heads=value)),
    ("flash_mla", "SPARSE_PREFILL", "dtype"): ("sparse_mla_attention", lambda value: sparse(dtype=value)),
    ("flash_mla", "SPARSE_PREFILL", "rank"): ("sparse_mla_attention", lambda value: sparse(rank=value)),
    ("flash_mla", "SPARSE_PREFILL", "rope_dim"): ("sparse_mla_attention", lambda value: sparse(rope_dim=value)),
    ("flash_mla", "SPARSE_PREFILL", "num_heads"): ("sparse_mla_attention", lambda value: sparse(num_heads=value)),
    ("flash_mla", "SPARSE_DECODE", "dtype"): ("sparse_mla_attention", lambda value: records(dtype=value)),
    ("flash_mla", "SPARSE_DECODE", "num_heads"): ("sparse_mla_attention", lambda value: records(num_heads=value)),
    ("deep_gemm", "PAGED_LOGITS", "dtype"): ("indexer_logits", lambda value: index(dtype=value)),
    ("deep_gemm", "PAGED_LOGITS", "num_heads"): ("indexer_logits", lambda value: index(num_heads=value)),
    ("deep_gemm", "PAGED_LOGITS", "block_size"): ("indexer_logits", lambda value: index(block_size=value)),
    ("deep_gemm", "LOGITS", "dtype"): ("indexer_logits", lambda value: index(dtype=value, **PREFILL)),
    ("flashinfer", "DECODE", "dtype"): ("paged_attention", lambda value: paged(dtype=value)),
    ("flashinfer", "DECODE", "head_dim"): ("paged_attention", lambda value: paged(head_dim=value)),
    ("flashinfer", "DECODE", "block_size"): ("paged_attention", lambda value: paged(block_size=value)),
    ("flashinfer", "DECODE", "group"): ("paged_attention", lambda value: paged(num_heads=value, kv_heads=1)),
    ("flashinfer", "PREFILL", "dtype"): ("paged_attention", lambda value: prompt(dtype=value)),
    ("flashinfer", "PREFILL", "dims"): (
        "paged_attention",
        lambda value: prompt(head_dim=value[0], value_dim=value[1]),
    ),
    ("flashinfer", "MLA_DECODE", "dtype"): ("mla_attention", lambda value: mla(dtype=value)),
    ("flashinfer", "MLA_DECODE", "rank"): ("mla_attention", lambda value: mla(mla_rank=value)),
    ("flashinfer", "MLA_DECODE", "rope_dim"): ("mla_attention", lambda value: mla(mla_rope_dim=value)),
    ("flashinfer", "MLA_DECODE", "num_heads"): ("mla_attention", lambda value: mla(mla_heads=value)),
    ("flashinfer", "MLA_DECODE", "block_size"): ("mla_attention", lambda value: mla(mla_block_size=value)),
    ("flashinfer", "MLA_PREFILL", "dtype"): ("mla_attention", lambda value: mla_prompt(dtype=value)),
    ("flashinfer", "MLA_PREFILL", "rank"): ("mla_attention", lambda value: mla_prompt(mla_rank=value)),
    ("flashinfer", "MLA_PREFILL", "rope_dim"): ("mla_attention", lambda value: mla_prompt(mla_rope_dim=value)),
    ("flashinfer", "MERGE_STATES", "dtype"): ("merge_attn_states", lambda value: merge(dtype=value)),
    ("flashinfer", "MERGE_STATES", "value_dim"): ("merge_attn_states", lambda value: merge(value_dim=value)),
    ("deep_gemm", "LOGITS", "num_heads"): ("indexer_logits", lambda value: index(num_heads=value, **PREFILL)),
}


def functions(provider: str) -> dict[str, Function]:
    module = import_module(f"kvbackend.backends.{provider}.vendor")
    return {name: value for name, value in vars(module).items() if isinstance(value, Function)}


EVERY = [
    (provider, name, limit, major)
    for provider in judge.PROVIDERS
    for name, function in functions(provider).items()
    for limit in function.limits
    for major in limit.majors or function.majors
]


def test_every_limit_is_walked() -> None:
    assert {(provider, name, limit.name) for provider, name, limit, _ in EVERY} == set(WALK)


def violations(limit: Limit) -> list[Any]:
    return {"dtype": [torch.float32], "dims": [(96, 96), (192, 192)]}.get(limit.name) or list(limit.rule.violations())


@pytest.mark.parametrize(
    ("provider", "name", "limit", "major"), EVERY, ids=lambda value: getattr(value, "name", str(value))
)
def test_a_violated_limit_is_refused(provider, name, limit, major, become) -> None:
    become(provider, (major, 0))
    function = functions(provider)[name]
    op, make = WALK[provider, name, limit.name]
    assert violations(limit)
    for value in violations(limit):
        reasons = judge.reasons(provider, op, make(value))
        expected = f"{value}; {function.name} takes {limit.rule} ({limit.source or function.source}): "
        assert [reason for reason in reasons if expected in reason], (value, reasons)


@pytest.mark.parametrize("provider", judge.PROVIDERS)
def test_every_source_names_the_commit_that_was_read(provider) -> None:
    commit = import_module(f"kvbackend.backends.{provider}.vendor").COMMIT[:7]
    for function in functions(provider).values():
        assert commit in function.source
        for limit in function.limits:
            assert not limit.source or commit in limit.source or "our own: " in limit.source


def test_caches_that_are_not_halves_are_refused(become) -> None:
    become("flash_mla")
    for call in (plain.mla_attention(mla_block_size=64, num_blocks=3), mla()):
        whole = call["ckv_cache"], call["kpe_cache"]
        swapped = dict(ckv_cache=call["ckv_cache"].clone(), kpe_cache=call["kpe_cache"])
        for caches in (swapped, dict(ckv_cache=whole[0].contiguous(), kpe_cache=whole[1].contiguous())):
            reasons = judge.reasons("flash_mla", "mla_attention", call | caches)
            assert any("halves of one dense tensor" in reason for reason in reasons)
    assert not judge.reasons("flash_mla", "mla_attention", mla())
    wide = torch.zeros(3, 64, 640, dtype=torch.bfloat16)  # rows with something behind them
    call = mla() | dict(ckv_cache=wide[..., :512], kpe_cache=wide[..., 512:576])
    assert any("halves of one dense" in reason for reason in judge.reasons("flash_mla", "mla_attention", call))


def test_long_chunks_are_not_decoded(become) -> None:
    become("flash_mla")
    reasons = judge.reasons("flash_mla", "mla_attention", mla(q_lens=(9, 1), seq_lens=(19, 40)))
    assert any("more than 4 queries for each sequence" in reason for reason in reasons)


def test_what_flash_mla_has_no_counterpart_of_is_refused(become) -> None:
    become("flash_mla")
    call = cases.shared_kv_attention(torch.bfloat16)
    assert not judge.reasons("flash_mla", "shared_kv_attention", call)
    for change, words in (
        (dict(kv=torch.zeros(13, 512).bfloat16()), "kv is given"),
        (dict(window_format="v41_fp8_528", window_cache=torch.zeros(10, 4 * 528).byte()), "window_format is"),
        (dict(kv_format="v41_fp4_288", compressed_cache=torch.zeros(20, 4 * 288).byte()), "kv_format is"),
    ):
        reasons = judge.reasons("flash_mla", "shared_kv_attention", call | change)
        assert any(words in reason for reason in reasons)


@pytest.mark.parametrize(
    ("major", "change", "words"),
    [
        (9, dict(window=5), "window is 5"),
        (9, dict(softcap=2.0), "softcap is 2.0"),
        (9, dict(return_lse=True), "returns none on this GPU"),
        (10, dict(return_lse=True, sinks=torch.zeros(4)), "return_lse is True with sinks"),
        (9, dict(key_bias=torch.zeros(24, 16, 2)), "key_bias is given"),
        (9, dict(value_cache=torch.zeros(24, 16, 2, 64).bfloat16()), "value_cache has 64 dims"),
        (12, dict(value_cache=torch.zeros(24, 2, 16, 128).bfloat16().transpose(1, 2)), "have strides"),
    ],
)
def test_what_flashinfer_decodes_not_is_refused(major, change, words, become) -> None:
    become("flashinfer", (major, 0))
    assert not judge.reasons("flashinfer", "paged_attention", paged())
    assert any(words in reason for reason in judge.reasons("flashinfer", "paged_attention", paged() | change))


def test_a_prompt_with_sinks_is_refused(become) -> None:
    become("flashinfer")
    assert not judge.reasons("flashinfer", "paged_attention", prompt())
    reasons = judge.reasons("flashinfer", "paged_attention", prompt(sink_dtype=torch.bfloat16))
    assert any("sinks is given" in reason for reason in reasons)


def test_planning_is_refused_in_a_captured_graph(become, monkeypatch) -> None:
    become("flashinfer")

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="a captured graph would keep that plan for ever"):
        planned.read("paged_attention", OnGpu(), *[None] * 3, 1, 16, True)  # type: ignore[arg-type]


def test_a_workspace_is_not_made_in_a_captured_graph(monkeypatch) -> None:
    """A captured call takes the one that was made before it; where there is none, it says to call once before."""
    gpu, other = torch.device("cuda:0"), torch.device("cuda:1")
    capturing, made = False, []

    def zeros(*size, device, **_):
        made.append(device)
        return object()

    monkeypatch.setattr(conventions, "_workspaces", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(conventions, "_stream", lambda device: 7 if capturing else 0)
    first = conventions.workspace(gpu)
    assert conventions.workspace(gpu) is first
    capturing = True
    assert conventions.workspace(gpu) is first
    with pytest.raises(UnsupportedError, match=r"no workspace on cuda:1; .*: call the op once before the capture"):
        conventions.workspace(other)
    capturing = False
    conventions.workspace(other)
    assert made == [gpu, other]


def test_a_gpu_that_lacks_a_function_gives_no_limits(become) -> None:
    become("flash_mla", (12, 0))
    reasons = judge.reasons("flash_mla", "mla_attention", mla(mla_heads=129, dtype=torch.float32))
    assert len(reasons) == 1
    assert "compute capability 12.0" in reasons[0]
