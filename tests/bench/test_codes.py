"""The measuring of formats: what it counts as moved, and that it runs every case."""

from __future__ import annotations

import pytest
import torch

from kvbackend import backends, formats
from kvbackend.bench import codes
from kvbackend.ops._samples import Maker
from kvbackend.ops.quantize_kv import every_format

pytestmark = pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "TOKENS", 128)
    monkeypatch.setattr(codes, "interleaved", lambda candidates, rounds: {name: [1e3] for name in candidates})


def test_every_format_and_op_is_measured() -> None:
    found = codes.format_times(["absorb_q", *codes.CASES])
    assert {result.op for result in found} == set(codes.CASES)
    for op in ("quantize_kv", "dequantize_kv"):
        measured = [result.kv_format for result in found if result.op == op]
        assert measured == [name for name, _ in every_format() if formats.get(name).quantized]
    # a millisecond each: the share of the limit is that of the bytes
    copied = 2 * 4 * (1 << 24) / 1e6
    for result in found:
        assert result.of_limit == pytest.approx(result.gbs / copied)


def test_ops_without_cases_are_not_measured() -> None:
    assert codes.format_times(["absorb_q"]) == []


def test_bytes_are_those_of_rows_codes_and_scales() -> None:
    rows = 128 * 8 * 128 * 2
    make = Maker(torch.device("cpu"), torch.bfloat16)
    for op in ("quantize_kv", "dequantize_kv"):
        moved = {case.kv_format: case.moved_bytes for case in codes.CASES[op](make)}
        assert moved["int8:token_head"] == rows + rows // 2 + 128 * 8 * 4
        assert moved["mxfp4:32"] == rows + rows // 4 + rows // 2 // 32
        assert moved["fp8_e4m3:tensor"] == rows + rows // 2 + 4
    moved = {case.kv_format: case.moved_bytes for case in codes.CASES["reshape_and_cache"](make)}
    assert moved["nvfp4"] == 2 * (rows + rows // 4 + rows // 2 // 16)
