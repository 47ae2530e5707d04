"""Why CANN's own torch ops cannot be called is said by name: the package, a state of an op, the operator's library."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
import torch

from kvbackend.backends.npu import cann_ops, target, vendor_ops
from tests.doubles import cann_ops_transformer

OP = vendor_ops.SPARSE_FLASH_MLA
Reasons = Callable[..., list[str]]


@pytest.fixture
def reasons(become, monkeypatch) -> Reasons:
    """What an NPU of CANN 9.2.0 says to the op where some libraries export some operators."""
    real_op = cann_ops.op
    become("950PR")
    monkeypatch.setattr(cann_ops, "op", real_op)
    monkeypatch.setattr(target, "found", lambda: target.Found(target.current()))

    def reasons(exported: dict[str, tuple[str, ...]] | None = None) -> list[str]:
        exported = {"libopapi_transformer.so": OP.aclnn} if exported is None else exported
        monkeypatch.setattr(
            cann_ops,
            "_exports",
            lambda library, symbol: symbol.removesuffix("GetWorkspaceSize") in exported.get(library, ()),
        )
        cann_ops._not_importable.cache_clear()
        found = list(OP.missing())
        cann_ops._not_importable.cache_clear()
        assert all(re.match(r"[^;]+; .+: .+", reason) for reason in found), found
        return found

    return reasons


def test_a_whole_machine_has_no_reason(reasons) -> None:
    assert reasons() == []
    assert reasons({"libopapi.so": OP.aclnn}) == []


def test_nothing_is_asked_where_there_is_no_npu(reasons, monkeypatch) -> None:
    monkeypatch.setattr(target, "found", lambda: target.Found(reasons=("none",)))
    assert reasons({}) == []


def test_a_package_that_is_not_installed(reasons, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, cann_ops.PACKAGE, None)
    (reason,) = reasons()
    assert reason.startswith("cann_ops_transformer cannot be imported (")
    assert "install CANN's ops-transformer package, 9.1.0 or newer" in reason


def test_an_op_in_a_state_that_is_not_known(reasons, monkeypatch) -> None:
    known = target.snapshots()[cann_ops.PACKAGE]
    other = [
        dict(entry, schema=entry["schema"].replace("int cmp_ratio=1, ", "")) for entry in known["sparse_flash_mla"]
    ]
    snapshots = {**target.snapshots(), cann_ops.PACKAGE: {**known, "sparse_flash_mla": other}}
    monkeypatch.setattr(target, "snapshots", lambda: snapshots)
    (reason,) = reasons()
    assert reason.startswith(
        "cann_ops_transformer.sparse_flash_mla is sparse_flash_mla(Tensor q, *, Tensor? ori_kv=None"
    )
    assert "int cmp_ratio=1" in reason
    assert "known are its states of ops-transformer branch 9.1.0" in reason


def test_an_op_that_the_package_lacks(reasons, monkeypatch) -> None:
    monkeypatch.setattr(
        cann_ops, "op", lambda name: getattr(torch.ops.cann_ops_transformer, name.replace("_metadata", "_of_old"))
    )
    (reason,) = reasons()
    assert reason.startswith(
        "cann_ops_transformer has no op sparse_flash_mla_metadata; it is called as of branch 9.1.0"
    )


def test_an_operator_that_no_library_exports(reasons) -> None:
    (reason,) = reasons({"libopapi.so": OP.aclnn[1:]})
    assert reason.startswith(
        "aclnnSparseFlashMla is in none of libcust_opapi.so, libopapi_transformer.so, libopapi.so;"
    )


@pytest.mark.parametrize("custom", ["libcust_opapi.so", "/opt/vendor/op_api/lib/libcust_opapi.so"])
def test_an_operator_of_somebody_else(custom, reasons, monkeypatch) -> None:
    """It may have other arguments, and CANN's wrapper would call it."""
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", "/opt/other:/opt/vendor")
    (reason,) = reasons({custom: OP.aclnn[:1], "libopapi.so": OP.aclnn})
    assert reason.startswith(f"aclnnSparseFlashMla is exported by {custom}, which is asked before CANN's own")


def test_a_library_is_looked_into() -> None:
    """By the loader itself, of the process's own libraries."""
    assert cann_ops._exports("libc.so.6", "strlen")
    assert not cann_ops._exports("libc.so.6", "aclnnSparseFlashMlaGetWorkspaceSize")
    assert not cann_ops._exports("libnobody_has.so", "strlen")


def test_the_double_can_be_another_state() -> None:
    """Masks that the adapters always pass had other defaults."""
    texts = [entry["schema"] for entry in target.snapshots()[cann_ops.PACKAGE]["sparse_flash_mla"]]
    assert "ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127" in texts[0]
    assert "ori_mask_mode=0, int cmp_mask_mode=0, int ori_win_left=-1" in texts[cann_ops_transformer.NEWEST]
