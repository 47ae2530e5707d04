"""`kvbackend matrix` on `npu:0`: samples are made there, the reference in float64 runs on the host."""

from __future__ import annotations

import torch

from kvbackend.matrix import documents, run_cell
from kvbackend.ops import registry


def test_cells_on_the_device_are_judged_on_the_host(fake_npu, monkeypatch) -> None:
    op = registry["apply_rope"]
    devices, reference = set(), op.reference

    def watched(**args):
        devices.update(value.device.type for value in args.values() if isinstance(value, torch.Tensor))
        return reference(**args)

    monkeypatch.setattr(op, "reference", watched)
    fake_npu.calls.clear()
    found = [
        run_cell(op, "npu", "npu:0", torch.bfloat16, sample, args)
        for sample, args in op.make_samples("npu:0", torch.bfloat16)
    ]
    assert {cell.status for cell in found} == {"pass"}, [cell for cell in found if cell.status != "pass"]
    assert fake_npu.calls
    assert devices == {"cpu"}


def test_the_document_names_the_chip_and_cann(fake_npu) -> None:
    found = documents.document([], ["npu:0"])
    assert found["chips"]["npu"]["arch"].startswith("Ascend")
    assert found["versions"]["torch_npu"]
    assert found["versions"]["cann"]
