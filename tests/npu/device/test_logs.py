"""Golden logs: which aclnn operator torch_npu calls on each product, with the arguments that it receives.

They change with torch_npu and with our calls; rewrite them with KVBACKEND_WRITE_LOGS=1 and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import kvbackend
from kvbackend.backends.npu import target
from kvbackend.ops import registry
from tests.npu import cases, judge
from tests.npu.device.moving import moved
from tests.npu.stub_cann.fake_aclnn import DTYPES

LOGGED = ("plain", "mixed", "not causal", "lse", "sinks", "records", "rows past the batch", "empty parts")
# operators that are called for their own sake, and how many of the float registers are arguments
VENDOR = {
    "aclnnScatterPaKvCache": 0,
    "aclnnScatterPaCache": 0,
    "aclnnGatherPaKvCache": 0,
    "aclnnFusedInferAttentionScoreV4": 1,
    "aclnnFusedInferAttentionScoreV5": 1,
    "aclnnSparseFlashAttention": 1,
    "aclnnKvQuantSparseFlashAttention": 1,
    "aclnnLightningIndexer": 0,
    "aclnnTransposeBatchMatMul": 0,
    "aclnnBatchMatMul": 0,
    "aclnnAttentionUpdate": 0,
    "aclnnRmsNorm": 1,
    "aclnnRotaryPositionEmbeddingV2": 0,
}


def text(record: Any) -> str:
    if not isinstance(record, dict):
        return repr(record)
    if "shape" in record:
        dtype = str(DTYPES[record["dtype"]]).removeprefix("torch.")
        dense = torch.empty(record["shape"], device="meta").stride()
        strides = "" if list(dense) == record["strides"] else f" strides {record['strides']}"
        return f"{dtype}{record['shape']}{strides}"
    if "tensors" in record:
        return "[" + ", ".join(map(text, record["tensors"])) + "]"
    return str(record.get("integers", record.get("floats", record.get("scalar"))))


def log(fake_npu) -> str:
    lines = []
    for op in judge.CALLING:
        for name, args in cases.of(op, torch.bfloat16):
            if name not in LOGGED or judge.reasons(op, args):
                continue
            device_args = moved(registry[op].bind((), args), "npu:0")
            fake_npu.calls.clear()
            with kvbackend.use("npu", ops=op):
                registry[op](**device_args)
            for operator, call in fake_npu.calls:
                if operator in VENDOR:
                    arguments = [text(record) for record in call["arguments"]]
                    arguments += [f"{number:.6g}" for number in call["floats"][: VENDOR[operator]]]
                    lines.append(f"{op} ({name}): {operator}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def test_calls_are_those_of_the_golden_log(fake_npu) -> None:
    path = Path(__file__).parent / "logs" / f"{target.current().family}.txt"
    got = log(fake_npu)
    if os.environ.get("KVBACKEND_WRITE_LOGS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(got)
    assert got.splitlines() == path.read_text().splitlines()
