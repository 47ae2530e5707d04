"""What the measuring of formats counts as moved."""

from __future__ import annotations

import torch

from kvbackend import formats
from kvbackend.bench import codes
from kvbackend.bench.workloads import cases
from kvbackend.ops._samples import Maker
from kvbackend.ops.quantize_kv import every_format


def test_every_format_is_measured() -> None:
    for op in ("quantize_kv", "dequantize_kv"):
        measured = [case.kv_format for case in cases([op])]
        assert measured == [name for name, _ in every_format() if formats.get(name).quantized]


def test_bytes_are_those_of_rows_codes_and_scales() -> None:
    rows = 128 * 8 * 128 * 2
    make = Maker(torch.device("cpu"), torch.bfloat16)
    for measure in (codes.quantize, codes.dequantize):
        moved = {case.kv_format: case.moved_bytes for case in measure(make, others=False)}
        assert moved["int8:token_head"] == rows + rows // 2 + 128 * 8 * 4
        assert moved["mxfp4:32"] == rows + rows // 4 + rows // 2 // 32
        assert moved["fp8_e4m3:tensor"] == rows + rows // 2 + 4
    moved = {case.kv_format: case.moved_bytes for case in codes.write(make, others=False)}
    assert moved["nvfp4"] == 2 * (rows + rows // 4 + rows // 2 // 16)
