"""Bytes of formats and records against the published layouts, and the refusals."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from kvbackend import formats
from kvbackend.errors import ArgumentError


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", 32), ("bf16", 16), ("fp16", 16), ("fp8_e4m3", 8), ("fp8_e5m2", 8), ("fp8_e4m3:head", 8),
        ("fp8_e4m3:channel", 8), ("int8", 8.25), ("fp8_e4m3:token_head", 8.25), ("fp8_e4m3:128", 8.0625),
        ("fp8_e4m3:64", 8.125), ("fp8_e5m2:32", 8.25), ("int4", 5), ("int4:64", 4.5), ("int4:128", 4.25),
        ("mxfp8", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.5), ("fp4_e2m1", 4.5), ("fp4_e2m1:32", 4.25),
    ],
)  # fmt: skip
def test_bits_per_value_of_a_head_of_128(name: str, bits: float) -> None:
    assert formats.get(name).bytes_per_token(3, 128) == 3 * Fraction(bits) * 128 / 8


@pytest.mark.parametrize(
    ("name", "data", "scales", "row", "page_of_64"),
    [
        ("v32_fp8_656", 640, 16, 656, 41984), ("v32_fp8_656_ascend", 640, 16, 656, 41984),
        ("v32_nvfp4_352", 320, 32, 352, 22528), ("v4_fp8_584", 576, 7, 584, 37440),
        ("v4_fp8_584_ascend", 576, 7, 584, 37376), ("v4_fp8_608_ascend", 576, 14, 608, 38912),
        ("v4_fp8_640_ascend", 576, 7, 640, 40960), ("v41_fp8_528", 512, 16, 528, 33792),
        ("v41_fp8_528_planar", 512, 16, 528, 33792), ("v41_fp4_288", 256, 32, 288, 18432),
        ("v41_fp4_288_planar", 256, 32, 288, 18432), ("index_fp8_132", 128, 4, 132, 8448),
        ("v41_index_fp8_132", 128, 4, 132, 8704), ("index_mxfp4_68", 64, 4, 68, 4352),
        ("v41_index_mxfp4_68", 64, 4, 68, 4608), ("index_int8_130", 128, 2, 130, 8320),
    ],
)  # fmt: skip
def test_records(name: str, data: int, scales: int, row: int, page_of_64: int) -> None:
    record = formats.record(name)
    assert (record.data_bytes, record.scale_bytes, record.row_bytes) == (data, scales, row)
    assert record.page_bytes(64) == page_of_64


def test_every_record_is_in_the_table_above() -> None:
    (mark,) = test_records.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(formats.record_names())


def test_pages_of_the_v4_record_are_padded_to_576_bytes() -> None:
    assert formats.record("v4_fp8_584").page_bytes(2) == 1728
    assert formats.record("v4_fp8_584").page_rule == "segregated"
    assert formats.record("v41_fp8_528").page_rule == "rows"


def test_records_name_index_keys_that_exist() -> None:
    companions = {formats.record(name).index for name in formats.record_names()} - {None}
    assert companions <= set(formats.record_names())
    assert all(formats.record(str(name)).holds == "index_key" for name in companions)


def test_same_bytes_in_another_order() -> None:
    cuda, ascend = formats.record("v32_fp8_656"), formats.record("v32_fp8_656_ascend")
    assert [field.name for field in cuda.planes[0]] == ["codes", "scales", "rope"]
    assert [field.name for field in ascend.planes[0]] == ["codes", "rope", "scales"]


@pytest.mark.parametrize("name", formats.names())
def test_a_format_is_found_again_by_its_own_text(name: str) -> None:
    for choice in ("", *(f":{choice}" for choice in formats.get(name).choices)):
        found = formats.get(name + choice)
        assert formats.get(str(found)) == found


def test_scales_that_a_cache_has_once() -> None:
    assert formats.get("fp8_e4m3").fixed_scale_bytes(8, 128) == 4
    assert formats.get("fp8_e4m3:head").fixed_scale_bytes(8, 128) == 32
    assert formats.get("fp8_e4m3:channel").fixed_scale_bytes(8, 128) == 4096
    assert formats.get("nvfp4").fixed_scale_bytes(8, 128) == 4
    assert formats.get("int8").fixed_scale_bytes(8, 128) == 0


def test_formats_of_keys_and_values() -> None:
    assert formats.pair("int8") == ("int8", "int8")
    assert formats.pair("int8/fp8_e4m3:head") == ("int8", "fp8_e4m3:head")
    assert formats.pair("auto/int8") == ("auto", "int8")
    for wrong in ("", "int8/", "/int8", "int8/fp9"):
        with pytest.raises(ArgumentError, match="kv_format is"):
            formats.pair(wrong)


def test_dtypes_by_name() -> None:
    assert formats.of_dtype("torch.bfloat16") is formats.get("bf16")
    assert formats.of_dtype("float32") is formats.get("fp32")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: formats.get("fp9"), ("'fp9'", "fp8_e4m3", "int4")),
        (lambda: formats.get("auto"), ("'auto'", "bf16")),
        (lambda: formats.get("int4:48"), ("'int4:48'", "32, 64, 128")),
        (lambda: formats.get("bf16:32"), ("takes nothing",)),
        (lambda: formats.get("v4_fp8_584"), ("584 bytes", "formats.record")),
        (lambda: formats.record("nope"), ("'nope'", "v4_fp8_584")),
        (lambda: formats.of_dtype("int64"), ("'int64'", "bfloat16")),
        (lambda: formats.get("int4").bytes_per_token(1, 7), ("head_dim is 7", "2 codes")),
        (lambda: formats.get("int4:64").bytes_per_token(1, 96), ("head_dim is 96", "int4:32")),
        (lambda: formats.get("bf16").bytes_per_token(0, 64), ("kv_heads is 0",)),
        (lambda: formats.record("v4_fp8_584").page_bytes(0), ("block_size is 0",)),
    ],
)
def test_refusals_say_what_is_allowed(call, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert all(word in str(caught.value) for word in words)


def test_importing_formats_and_the_planner_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, kvbackend.formats, kvbackend.planner; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
