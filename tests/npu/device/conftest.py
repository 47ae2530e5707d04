"""Tests on `npu:0` with the real torch_npu over a fake CANN: ci/npu_check.sh runs them, in its own environment."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from kvbackend.backends.npu import cann_ops
from tests.doubles import cann_ops_transformer

collect_ignore_glob = [] if os.environ.get("ASCEND_STUB_SOC") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def fake_npu():
    """`npu:0` on host memory."""
    import torch_npu  # noqa: F401  (registers the device)

    from tests.npu.stub_cann import aten, fake_aclnn  # noqa: F401

    torch.empty(1, device="npu:0")
    fake_aclnn.install()
    return fake_aclnn


@pytest.fixture(scope="session", autouse=True)
def fake_package():
    """CANN's package of torch ops, whose wrappers only CANN can compile: its schemas over our model."""
    sys.modules[cann_ops.PACKAGE] = cann_ops_transformer.module()
    return cann_ops_transformer.define()


@pytest.fixture(autouse=True)
def fresh_log(fake_npu):
    fake_npu.calls.clear()
    fake_npu.problems.clear()
