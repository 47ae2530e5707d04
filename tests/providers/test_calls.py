"""The providers' calls against published signatures and checks, on CPU tensors: translated, not run."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import reduce
from importlib import import_module

import pytest
import torch

from kvbackend.backends import nvidia, single_queries
from kvbackend.ops import registry
from tests.providers import cases, judge

BF16, HALVES, EVERY = {torch.bfloat16}, {torch.bfloat16, torch.float16}, set(judge.DTYPES)

# (provider, op) -> major compute capability -> the dtypes (of the samples) in which some call is taken
TAKEN = {
    ("flash_mla", "mla_attention"): {9: HALVES},
    ("flash_mla", "sparse_mla_attention"): {9: BF16, 10: BF16},
    ("flash_mla", "shared_kv_attention"): {9: BF16, 10: BF16},
    ("deep_gemm", "indexer_logits"): {9: EVERY, 10: EVERY},
    ("flashinfer", "paged_attention"): dict.fromkeys((8, 9, 10, 12), HALVES),
    ("flashinfer", "mla_attention"): {8: HALVES, 9: HALVES, 10: BF16},
    ("flashinfer", "merge_attn_states"): dict.fromkeys((8, 9, 10, 12), HALVES),
}
MAJORS = (8, 9, 10, 12)
EVERY_ADAPTER = pytest.mark.parametrize(
    ("provider", "op"), [(provider, op) for provider in judge.PROVIDERS for op in judge.adapted(provider)]
)


def test_every_adapter_is_listed() -> None:
    assert {(provider, op) for provider in judge.PROVIDERS for op in judge.adapted(provider)} == set(TAKEN)


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("dtype", judge.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@EVERY_ADAPTER
def test_accepted_calls_equal_the_reference(provider, op, dtype, major, become) -> None:
    double = become(provider, (major, 0))
    taken = 0
    for name, args in cases.every(provider, op, dtype):
        if judge.reasons(provider, op, args):
            continue
        taken += 1
        assert not judge.faults(op, args, judge.run(provider, op, args)), name
    assert bool(taken) == (dtype in TAKEN[provider, op].get(major, set()))
    assert bool(double.calls) == bool(taken)


@EVERY_ADAPTER
def test_own_cases_are_taken(provider, op, become) -> None:
    """They are made to be, on some GPU: one that is refused on all tests nothing."""
    refused = {name: [] for name, _ in cases.of(provider, op, torch.bfloat16)}
    for major in MAJORS:
        become(provider, (major, 0))
        for name, args in cases.of(provider, op, torch.bfloat16):
            refused[name].append(judge.reasons(provider, op, args))
    assert not {name: reasons for name, reasons in refused.items() if all(reasons)}


@EVERY_ADAPTER
def test_other_gpus_are_refused_by_name(provider, op, become) -> None:
    become(provider, (7, 5))
    _, args = next(cases.of(provider, op, torch.bfloat16))
    reasons = judge.reasons(provider, op, args)
    assert any("compute capability 7.5" in reason and ".x" in reason for reason in reasons)


@pytest.mark.parametrize("provider", judge.PROVIDERS)
def test_what_is_called_stands_in_the_published_signatures(provider) -> None:
    """`Package.calls`, which is compared with an installed library, is a part of what the double was written from."""
    package = import_module(f"kvbackend.backends.{provider}.vendor").PACKAGE
    double = import_module(f"tests.doubles.{provider}")
    assert not list(_lacking(double.library(), package))
    commit = import_module(f"kvbackend.backends.{provider}.vendor").COMMIT
    assert commit in (double.__doc__ or "")
    assert commit[:7] in package.source


def _lacking(module, package):
    for name, parameters in package.calls.items():
        function = reduce(getattr, name.split("."), module)
        yield from set(parameters) - set(inspect.signature(function).parameters)


@pytest.mark.parametrize("provider", judge.PROVIDERS)
def test_missing_says_what_is_missing(provider, monkeypatch) -> None:
    package = import_module(f"kvbackend.backends.{provider}.vendor").PACKAGE
    monkeypatch.setattr(nvidia, "find_spec", lambda name: None)
    assert [f"{provider} is not installed" in reason for reason in package.missing()] == [True]
    monkeypatch.setattr(nvidia, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ["no CUDA device" in reason for reason in package.missing()] == [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvidia, "import_module", _raises)
    assert ["cannot be imported (no libcuda)" in reason for reason in package.missing()] == [True]
    double = import_module(f"tests.doubles.{provider}").library()
    monkeypatch.setattr(nvidia, "import_module", lambda name: double)
    assert not list(package.missing())
    name = next(iter(package.calls))
    *path, last = name.split(".")
    delattr(reduce(getattr, path, double), last)
    assert [f"has no {name}" in reason for reason in package.missing()] == [True]


def _raises(name: str) -> None:
    raise OSError("no libcuda")


@pytest.mark.parametrize("provider", judge.PROVIDERS)
def test_an_older_signature_is_refused_by_its_parameter(provider, monkeypatch) -> None:
    package = import_module(f"kvbackend.backends.{provider}.vendor").PACKAGE
    name, parameters = next((name, names) for name, names in package.calls.items() if names)
    double = import_module(f"tests.doubles.{provider}").library()
    *path, last = name.split(".")
    setattr(reduce(getattr, path, double), last, lambda: None)
    monkeypatch.setattr(nvidia, "find_spec", lambda name: name)
    monkeypatch.setattr(nvidia, "import_module", lambda name: double)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (reason,) = package.missing()
    assert f"parameter {parameters[0]} of {name}" in reason


def test_asking_imports_no_library() -> None:
    names = "', '".join(judge.PROVIDERS)
    code = (
        f"import sys\nfor name in ('{names}'):\n    sys.modules[name] = None  # importing it raises\n"
        "import kvbackend, torch\nfrom kvbackend import backends\nfrom kvbackend.ops import registry\n"
        f"for name in ('{names}'):\n"
        "    for op in registry.values():\n"
        "        adapter = backends.registered()[name].adapter(op.name)\n"
        "        for _, args in op.make_samples('meta', torch.bfloat16) if adapter else ():\n"
        "            list(adapter.unsupported(**op.dispatcher.views(op.bind((), args))))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_single_queries_walk_the_batch() -> None:
    """By hand: blocks of 4; a sequence of 6 tokens with 2 queries, one of 9 with a hole and 1 query, a row past."""
    table = torch.tensor([[5, 7, 99], [3, -1, 8]])
    batch = single_queries.expand(
        table, torch.tensor([6, 9]).int(), torch.tensor([0, 2, 3]).int(), 2, 4, 4, causal=True
    )
    assert batch.lengths.tolist() == [5, 6, 5, 1]
    assert batch.empty.tolist() == [False, False, False, True]
    assert batch.block_table.tolist() == [[5, 7, 0], [5, 7, 0], [3, 8, 0], [0, 0, 0]]
    every = single_queries.expand(
        table, torch.tensor([6, 9]).int(), torch.tensor([0, 2, 3]).int(), 2, 4, 4, causal=False
    )
    assert every.lengths.tolist() == [6, 6, 5, 1]


def test_too_many_queries_are_not_decoding() -> None:
    assert not single_queries.is_prefill("q", torch.empty(8), torch.empty(2))
    assert single_queries.is_prefill("q", torch.empty(9), torch.empty(2))


def test_registered_before_our_own_kernels() -> None:
    from kvbackend import backends

    order = [backend.name for backend in backends.serving("cuda")]
    assert [name for name in order if name in judge.PROVIDERS] == list(judge.PROVIDERS)
    assert order.index("cuda_triton") > max(order.index(name) for name in judge.PROVIDERS)
    assert set(registry) >= {op for _, op in TAKEN}
