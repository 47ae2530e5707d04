"""What the measuring of formats counts as moved."""

from __future__ import annotations

import torch

from kvbackend import codecs, formats
from kvbackend.bench import codes, torch_codecs
from kvbackend.bench.workloads import cases
from kvbackend.ops._samples import Maker
from kvbackend.ops.quantize_kv import every_format


def test_every_format_is_measured() -> None:
    for op in ("quantize_kv", "dequantize_kv"):
        measured = [case.kv_format for case in cases([op]) if not case.case.endswith("scale given")]
        assert measured == [name for name, _ in every_format() if formats.get(name).quantized]


def test_bytes_are_those_of_rows_codes_and_scales() -> None:
    rows = 128 * 8 * 128 * 2
    make = Maker(torch.device("cpu"), torch.bfloat16)
    for measure in (codes.quantize, codes.dequantize):
        moved = {(case.kv_format, case.case): case.moved_bytes for case in measure(make, others=False)}
        assert moved["int8:token_head", "key rows"] == rows + rows // 2 + 128 * 8 * 4
        assert moved["mxfp4:32", "key rows"] == rows + rows // 4 + rows // 2 // 32
        twice = measure is codes.quantize  # rows, once for their scale
        assert moved["fp8_e4m3:tensor", "key rows"] == rows * (1 + twice) + rows // 2 + 4
        assert moved.get(("fp8_e4m3:tensor", "key rows, scale given"), 0) == (rows + rows // 2 + 4) * twice
    moved = {case.kv_format: case.moved_bytes for case in codes.write(make, others=False)}
    assert moved["nvfp4"] == 2 * (rows + rows // 4 + rows // 2 // 16)


def test_the_peer_codes_as_the_codecs_do() -> None:
    """Ties aside, of which E2M1 and int8 meet a few in a hundred."""
    x = torch.randn(128, 4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name, role in every_format():
        fmt = formats.get(name)
        if not fmt.quantized:
            continue
        whole = torch.tensor([0.002]) if fmt.global_scale else None
        stored, scales = codecs.encode(x, name, role, whole)
        coded = torch_codecs.encode(x, fmt, role, whole, None)[0]
        assert (coded.dtype, coded.shape) == (stored.dtype, stored.shape)
        assert (coded.view(torch.uint8) == stored.view(torch.uint8)).float().mean() > 0.98, name
        decoded = torch_codecs.decode(stored, scales, fmt, role, whole)
        assert torch.equal(decoded, codecs.decode(stored, scales, name, role, whole, torch.bfloat16)), name
        if fmt.granularity in codecs.split.STATIC:
            given = torch_codecs.encode(x, fmt, role, whole, scales)[0]
            assert torch.equal(given.view(torch.uint8), coded.view(torch.uint8)), name
