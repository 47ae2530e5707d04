"""Values of the Triton kernels without a GPU: every contract sample, interpreted, against the reference in float64."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbackend import backends
from kvbackend.ops import registry

ROOT = Path(__file__).parents[2]
WITH_LAUNCHER = [name for name in registry if backends.registered()["cuda_triton"].adapter(name)]

# What launchers may refuse of the samples: op -> words that the reason must hold.
ALLOWED_REFUSALS = {
    "quantize_kv": "whose groups span tokens",
    "paged_attention": "reads keys as they are stored",  # rope at read
    "sparse_mla_attention": "whose scales are shuffled",
    "indexer_logits": "q is torch.float8_e4m3fn",
}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),  # all samples run in one process, which the first test waits for
]


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda_triton.interpreted", *WITH_LAUNCHER],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("name", WITH_LAUNCHER)
def test_every_sample_equals_the_reference(name: str, verdicts: dict[str, Any]) -> None:
    found = verdicts[name]
    faults = {sample: verdict for sample, verdict in found.items() if isinstance(verdict, str)}
    refused = [reason for verdict in found.values() if isinstance(verdict, list) for reason in verdict]
    assert not faults
    assert sum(verdict is None for verdict in found.values()) > len(found) // 2
    assert not [reason for reason in refused if ALLOWED_REFUSALS.get(name, "no reason at all") not in reason]


def test_offsets_beyond_two_to_the_31(verdicts: dict[str, Any]) -> None:
    found = verdicts["far blocks"]
    assert found
    assert not {op: fault for op, fault in found.items() if fault}


def test_a_row_does_not_depend_on_its_batch_mates(verdicts: dict[str, Any]) -> None:
    found = verdicts["batch mates"]
    assert found
    assert not {op: fault for op, fault in found.items() if fault}
