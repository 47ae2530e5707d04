"""Rung 1 of docs/ascend.md: our calls against published signatures and documented limits, without torch_npu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvbackend import ArgumentError, UnsupportedError
from kvbackend.backends.npu import host_lengths, target, vendor_ops
from kvbackend.backends.npu.target import A5, FAMILIES, snapshots
from kvbackend.compat import rules, versions
from kvbackend.ops import registry
from tests.doubles import cann_ops_transformer
from tests.npu import cann_vendor, cases, judge, vendor

HALVES_ONLY = ("paged_attention", "mla_attention", "sparse_mla_attention", "lightning_indexer", "shared_kv_attention")
NEEDS_26 = ("reshape_and_cache", "concat_and_cache_mla", "gather_cache", "store_rows")
TRAINS = list(snapshots()["wheels"])
EVERY_OP = pytest.mark.parametrize("op", judge.CALLING)


def takes_some(op: str, dtype: torch.dtype, family: str) -> bool:
    """Whether a product takes any call of an op in a dtype, as the documentation has it."""
    if op == "store_rows":
        return family in A5
    if op == "merge_attn_states":
        return family != "950PR"
    if dtype is torch.float32 and op in ("reshape_and_cache", "concat_and_cache_mla", "gather_cache"):
        return family in A5
    return dtype is not torch.float32 or op not in HALVES_ONLY


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", judge.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@EVERY_OP
def test_accepted_calls_equal_the_reference(op, dtype, family, become) -> None:
    double = become(family)
    taken = 0
    for name, args in cases.every(op, dtype):
        if judge.reasons(op, args):
            continue
        taken += 1
        assert not judge.faults(op, args, judge.run(op, args)), name
    assert bool(taken) == takes_some(op, dtype, family)
    assert bool(double.calls) == bool(taken and op != "project_out")


@pytest.mark.parametrize("train", TRAINS)
@EVERY_OP
def test_calls_fit_the_signatures_of_every_build_train(op, train, become) -> None:
    """950DT is not older than 26.1.0 in fact; here it stands for the product that takes most."""
    become("950DT", train, "9.2.0")
    taken = 0
    for name, args in cases.every(op, torch.bfloat16):
        if not judge.reasons(op, args):
            taken += 1
            assert not judge.faults(op, args, judge.run(op, args)), name
    assert bool(taken) == (train >= "2026-04" or op not in NEEDS_26)


@pytest.mark.parametrize("state", [0, cann_ops_transformer.NEWEST], ids=["9.1.0", "master"])
@pytest.mark.parametrize("op", ["shared_kv_attention", "lightning_indexer"])
def test_calls_rest_on_no_default_of_a_state_of_canns_package(op, state, become) -> None:
    """The two states have other defaults for masks and windows."""
    double = become("910_93", state=state)
    for name, args in cases.every(op, torch.bfloat16):
        if not judge.reasons(op, args):
            assert not judge.faults(op, args, judge.run(op, args)), name
    assert any(vendor_name.startswith("cann_ops_transformer.") for vendor_name, _ in double.calls)


@pytest.mark.parametrize("op", ["paged_attention", "shared_kv_attention"])
def test_a_promise_spares_the_wait(op, become) -> None:
    double = become("950PR")
    double.npu.is_current_stream_capturing = lambda: True
    call = getattr(cases, op)(q_lens=(2, 1), seq_lens=(140, 9))
    with host_lengths.given([0, 2, 3], [140, 9]):
        assert not judge.faults(op, call, judge.run(op, call))
    with pytest.raises(UnsupportedError, match="was called while a graph is captured; "):  # nothing is given any more
        judge.run(op, call)


def test_every_op_has_an_adapter_or_says_why_not() -> None:
    package = __import__("kvbackend.backends.npu", fromlist=["WITHOUT"])
    assert set(package.WITHOUT) == set(registry) - set(judge.ADAPTED)
    for words in package.WITHOUT.values():  # and where that was read
        assert re.search(r"\((schemas of the torch_npu wheels|op-plugin documentation) .*\)", words), words


def test_lengths_of_another_batch(become) -> None:
    become("950PR")
    call = cases.paged_attention(q_lens=(2, 1), seq_lens=(140, 9))
    with host_lengths.given([0, 3], [140]), pytest.raises(ArgumentError, match="given has 1 sequences and the call"):
        judge.run("paged_attention", call)


@pytest.mark.parametrize(
    ("ends", "lens"), [([0, 2], [3, 4]), ([1, 2], [3]), ([0, 2, 2], [3, 4]), ([0, 1, 2], [3, 0]), ([], [])]
)
def test_lengths_that_cannot_be_given(ends, lens) -> None:
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q is \[.*; .*: leave"), host_lengths.given(ends, lens):
        pass


def test_snapshots_agree_with_the_matrix_of_releases() -> None:
    """Wheels of one train are of one TorchNPU product where the matrix names it, and trains rise with products."""
    last = None
    for wheels in snapshots()["wheels"].values():
        products = {versions.base(rules.product_of(wheel)) for wheel in wheels} - {""}
        assert len(products) <= 1
        for product in products:
            assert last is None or versions.parse(product) > versions.parse(last)
            last = product


@pytest.mark.parametrize(
    ("version", "train"),
    [("2.9.0", "2026-01"), ("2.10.0.post4", "2026-07"), ("2.13.0", "2026-10"), ("2.13.0+git1", "2026-10"),
     ("2.13.0.post1", "2026-10"), ("2.15.0", "2026-10"), ("2.9.0.post3", None), ("2.8.0", None), ("nonsense", None)],
)  # fmt: skip
def test_train_of_a_version(version, train) -> None:
    assert target.train_of(version) == train


@pytest.mark.parametrize(
    ("soc", "family"),
    [("Ascend950PR_9599", "950PR"), ("Ascend950DT_95A2", "950DT"), ("Ascend910B4-1", "910B"),
     ("Ascend910_9391", "910_93"), ("Ascend310P3", None), ("Ascend910A", None), ("", None)],
)  # fmt: skip
def test_family_of_a_soc(soc, family) -> None:
    assert target.family_of(soc) == family


def test_old_train_old_cann_and_other_product_are_refused_by_name(become) -> None:
    scatter, update = vendor_ops.SCATTER_PA_KV_CACHE, vendor_ops.ATTENTION_UPDATE
    become("910B", "2026-01")
    assert "cache_mode came with 26.0.0" in next(scatter.missing())
    become("950PR", cann="8.5.0")
    assert "needs 9.0.0 or newer" in next(scatter.missing())
    become("950PR")
    assert "names 950DT and not 950PR" in next(update.missing())
    become("950DT")
    assert not list(update.missing()) + list(scatter.missing())


def test_lengths_for_the_host_are_refused_in_a_captured_graph(become) -> None:
    double = become("950PR")
    double.npu.is_current_stream_capturing = lambda: True
    with pytest.raises(Exception, match="host integers, which a captured graph would keep"):
        judge.run("paged_attention", cases.paged_attention())
    assert not double.calls


def test_the_vendor_model_knows_every_op_that_is_called() -> None:
    of_cann = {op.name.partition(".")[2] for op in vendor_ops.ALL if op.of_cann}
    with_metadata = of_cann | {f"{name}_metadata" for name in of_cann}
    assert with_metadata == set(cann_vendor.OPERATORS) == set(snapshots()["cann_ops_transformer"])
    of_torch_npu = {op.name for op in vendor_ops.ALL if not op.of_cann}
    assert {name.split(".")[0] for name in of_torch_npu} == set(vendor.OPERATORS)
    assert of_torch_npu == set(snapshots()["schemas"])


def test_aclnn_operators_are_those_of_the_golden_logs() -> None:
    logs = (Path(__file__).parent / "device" / "logs").glob("*.txt")
    called = {name for log in logs for name in re.findall(r"\): (aclnn\w+)\(", log.read_text())}
    plain_torch = {"aclnnBatchMatMul"}
    assert called - plain_torch == {name for op in vendor_ops.ALL if not op.of_cann for name in op.aclnn}
