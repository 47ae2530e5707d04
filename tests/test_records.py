"""Records to the bit: published bytes, page families, orders of one content, and what is not finite."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbackend import formats
from kvbackend.codecs import join_pages, pack_record, split_pages, unpack_record
from tests.codes import raw, relative, there_and_back

NAN, INF = math.nan, math.inf


def rows_of(num_tokens: int, width: int) -> torch.Tensor:
    """Numbers that bfloat16 holds exactly; each row twice as large as the one before."""
    i, t = torch.arange(width), torch.arange(num_tokens)[:, None]
    return (((37 * i + 53 * t) % 101) - 50) / 16.0 * 2.0**t


def width_of(name: str) -> int:
    return sum(formats.record(name).dims)


def packed(name: str, **how) -> torch.Tensor:
    return pack_record(rows_of(4, 576)[None, :, : width_of(name)], name, **how)


def digest(pages: torch.Tensor) -> str:
    return hashlib.sha256(bytes(raw(pages))).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "how", "num_bytes", "want"),
    [
        ("v32_fp8_656", {}, 2624, "7afbee1589830f28"),
        ("v32_fp8_656", {"rule": "amax"}, 2624, "b3652071ec61b294"),
        ("v32_fp8_656_ascend", {}, 2624, "a55afd1d3bd3e091"),
        ("v32_fp8_656_ascend", {"rule": "amax"}, 2624, "8a96c5f713f960c2"),
        ("v32_nvfp4_352", {}, 1408, "82da5e8876bba423"),
        ("v4_fp8_584", {}, 2336, "5fe1dc8297ae0870"),
        ("v4_fp8_584", {}, 2880, "97e8fc34366d99d1"),
        ("v4_fp8_640_ascend", {}, 2560, "1c17a3be99741989"),
        ("v41_fp8_528", {}, 2112, "911da7eaee123318"),
        ("v41_fp8_528_planar", {}, 2112, "defe6ccfb703ce54"),
        ("v41_fp4_288", {}, 1152, "ea25ad1d2dab3934"),
        ("v41_fp4_288_planar", {}, 1152, "3543a3798cf95fbb"),
        ("index_fp8_132", {}, 528, "9e283c204237c79a"),
        ("v41_index_fp8_132", {}, 528, "9e283c204237c79a"),
        ("index_mxfp4_68", {}, 272, "508daba72b034d16"),
        ("v41_index_mxfp4_68", {}, 272, "508daba72b034d16"),
    ],
)
def test_record_bytes(name: str, how: dict[str, str], num_bytes: int, want: str) -> None:
    """Four rows on one page; where the page is longer than named, the rest is padding."""
    pages = packed(name, **how)
    assert pages.shape == (1, formats.record(name).page_bytes(4))
    assert digest(pages[:, :num_bytes]) == want
    assert not pages[:, num_bytes:].any()


def test_record_bytes_that_can_be_read() -> None:
    fields = split_pages(packed("v4_fp8_584"), formats.record("v4_fp8_584"), 4)
    assert raw(fields["scales"][0, 0]) == [120] * 7
    assert raw(fields["scales"][0, 3]) == [123] * 7
    page = packed("v41_fp4_288")
    assert page[0, :8].tolist() == [191, 229, 105, 46, 199, 244, 90, 14]
    assert set(page[0, 256:260].tolist()) == {48}
    assert raw(split_pages(packed("index_mxfp4_68"), formats.record("index_mxfp4_68"), 4)["scales"][0, 0]) == [127] * 4


def test_offsets_of_the_two_page_families() -> None:
    """Slot 300 in pages of 128 rows: where engines look for its data and its scale."""
    marked = torch.zeros(3, 128, 512)
    marked[300 // 128, 300 % 128] = 1.0
    for name, data, scale in (
        ("v41_fp8_528_planar", 157696, 201408), ("v41_fp8_528", 158400, 158912),
        ("v41_fp4_288_planar", 84992, 107904), ("v41_fp4_288", 86400, 86656),
    ):  # fmt: skip
        pages, empty = pack_record(marked, name), pack_record(torch.zeros_like(marked), name)
        differ = (pages != empty).flatten().nonzero().flatten().tolist()
        record = formats.record(name)
        assert differ[0] == data
        assert scale in differ
        assert len(differ) == record.data_bytes + record.scale_bytes


@pytest.mark.parametrize("name", formats.record_names())
@pytest.mark.parametrize("num_blocks", [0, 3])
def test_records_there_and_back(name: str, num_blocks: int) -> None:
    record, block_size = formats.record(name), 5
    x = torch.randn(num_blocks, block_size, width_of(name), generator=torch.Generator().manual_seed(9)).bfloat16()
    pages = pack_record(x, name)
    assert (pages.shape, pages.dtype) == ((num_blocks, record.page_bytes(block_size)), torch.uint8)
    back = unpack_record(pages, name, block_size)
    assert back.shape == x.shape
    if record.name != "index_int8_130":
        again = unpack_record(pack_record(back, name), name, block_size)
        assert torch.equal(again, back), "a second round trip changes nothing"
    fields = split_pages(pages, record, block_size)
    assert torch.equal(join_pages(fields, record), pages)
    assert torch.equal(unpack_record(pages, name, block_size, torch.bfloat16), back.bfloat16())
    if num_blocks:
        assert relative(back, x) < (0.11 if fields["codes"].dtype is torch.uint8 and "index" not in name else 0.13)


def test_records_hold_what_the_formats_hold() -> None:
    """The same numbers by the split codec, per block: a record is nothing but an order of bytes."""
    x = torch.randn(2, 4, 512, generator=torch.Generator().manual_seed(10)).bfloat16()
    for record, fmt in (("v41_fp8_528", "fp8_e4m3:32"), ("v41_fp4_288", "fp4_e2m1"), ("v32_nvfp4_352", "fp4_e2m1")):
        rows = torch.nn.functional.pad(x, (0, width_of(record) - 512))
        want = there_and_back(x, fmt)
        assert torch.equal(unpack_record(pack_record(rows, record), record, 4)[..., :512], want)
    want = there_and_back(x[..., :448], "fp8_e4m3:64")
    for record in ("v4_fp8_584", "v4_fp8_584_ascend", "v4_fp8_608_ascend", "v4_fp8_640_ascend"):
        back = unpack_record(pack_record(x, record), record, 4)
        assert torch.equal(back[..., :448], want)
        assert torch.equal(back[..., 448:], x[..., 448:].float()), "the rotary part is kept"


def test_a_scale_of_the_352_byte_row_is_where_vllm_puts_it() -> None:
    x = torch.zeros(1, 1, 576)
    for block in range(32):
        x[0, 0, 16 * block] = 6 * 2.0 ** (block % 8 - 4) * (1 + block // 8 / 4)
    scales = split_pages(pack_record(x, "v32_nvfp4_352"), formats.record("v32_nvfp4_352"), 1)["scales"][0, 0].float()
    for block in range(32):
        assert scales[8 * (block & 3) + (block >> 2)] == 2.0 ** (block % 8 - 4) * (1 + block // 8 / 4)


@pytest.mark.parametrize(
    ("source", "target"),
    [("v32_fp8_656", "v32_fp8_656_ascend"), ("v4_fp8_584", "v4_fp8_640_ascend"), ("v41_fp8_528", "v41_fp8_528_planar"),
     ("v4_fp8_584", "v4_fp8_584_ascend"), ("v41_fp4_288_planar", "v41_fp4_288")],
)  # fmt: skip
def test_orders_of_one_content_differ_by_moving_bytes(source: str, target: str) -> None:
    moved = join_pages(split_pages(packed(source), formats.record(source), 4), formats.record(target))
    assert torch.equal(moved, packed(target))
    assert torch.equal(
        join_pages(split_pages(moved, formats.record(target), 4), formats.record(source)), packed(source)
    )


def test_floors_of_records() -> None:
    """Where every number is tiny: 1e-4 on amax (DeepSeek, vLLM), or on amax / 448 (FlashMLA's tests, SGLang)."""
    tiny = torch.full((1, 1, 512), 2.0**-20)
    scales = {floor: pack_record(tiny, "v41_fp8_528", floor=floor)[0, 512].item() for floor in (None, 0.0448)}
    assert scales == {None: 105, 0.0448: 114}
    rows = torch.full((1, 1, 576), 2.0**-20)
    read = {
        rule: pack_record(rows, "v32_fp8_656", rule)[0, 512:516].view(torch.float32).item()
        for rule in ("pow2_ceil", "amax")
    }
    assert read == {"pow2_ceil": 2.0**-13, "amax": float(np.float32(2**-20) / np.float32(448))}
    zero = pack_record(torch.zeros(1, 1, 576), "v32_fp8_656", "amax")[0, 512:516].view(torch.float32).item()
    assert zero == pytest.approx(torch.finfo(torch.float32).tiny, rel=1e-6)


def test_nan_in_records() -> None:
    """A NaN is coded as 0, but spoils its 16 channels in DeepSeek-V4.1's FP4 rows; the bfloat16 part keeps it."""
    for name in formats.record_names():
        x = torch.ones(1, 2, width_of(name))
        x[0, 1, 17] = NAN
        back = unpack_record(pack_record(x, name), name, 2)[0]
        assert back[0].tolist() == pytest.approx([1] * width_of(name), rel=0.04), name
        spoiled = back[1].isnan()
        if name.startswith("v41_fp4"):
            assert spoiled.nonzero().flatten().tolist() == list(range(16, 32))
            page = split_pages(pack_record(x, name), formats.record(name), 2)
            assert raw(page["scales"][0, 1, 1:2]) == [0x7F]
            assert set(raw(page["codes"][0, 1, 8:16])) == {0}
        else:
            assert not spoiled.any(), name
            assert back[1, 17] == 0
            assert float(back[1, 16]) == pytest.approx(1, rel=0.04), name
    x = torch.ones(1, 1, 512)
    x[..., 500] = NAN
    assert unpack_record(pack_record(x, "v4_fp8_584"), "v4_fp8_584", 1)[0, 0, 500].isnan()


@pytest.mark.parametrize("name", formats.record_names())
def test_infinity_saturates_in_records(name: str) -> None:
    x = torch.ones(1, 1, width_of(name))
    x[..., 3], x[..., 70] = INF, -INF
    back = unpack_record(pack_record(x, name), name, 1)[0, 0]
    assert back.isfinite().all()
    floor = 2688 if name in ("v32_nvfp4_352", "v41_fp4_288", "v41_fp4_288_planar") else 65000
    assert float(back[3]) >= floor
    assert float(back[70]) <= -floor


@pytest.mark.parametrize("name", formats.record_names())
def test_records_look_at_no_value(name: str) -> None:
    x = torch.empty(2, 3, width_of(name), device="meta", dtype=torch.bfloat16)
    assert unpack_record(pack_record(x, name), name, 3).shape == x.shape


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(formats.record_names()), st.integers(1, 3), st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_bytes_survive_a_change_of_order(name: str, num_blocks: int, block_size: int, random) -> None:  # type: ignore[no-untyped-def]
    """Fields are bytes: codes that are NaN or unused come through as they are; only padding becomes zero."""
    record = formats.record(name)
    size = record.page_bytes(block_size)
    pages = torch.tensor(list(random.randbytes(num_blocks * size)), dtype=torch.uint8).reshape(num_blocks, size)
    fields = split_pages(pages, record, block_size)
    joined = join_pages(fields, record)
    again = split_pages(joined, record, block_size)
    assert all(torch.equal(again[key].view(torch.uint8), fields[key].view(torch.uint8)) for key in fields)
    data = sum(field.bytes for plane in record.planes for field in plane if field.name != "pad")
    assert int((joined == pages).sum()) >= num_blocks * block_size * data


def test_every_record_is_in_this_file() -> None:
    """A new record needs bytes here."""
    (mark,) = (mark for mark in test_record_bytes.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    unpublished = {"v4_fp8_584_ascend", "v4_fp8_608_ascend", "index_int8_130"}  # no vectors: judged by their siblings
    assert {row[0] for row in mark.args[1]} | unpublished == set(formats.record_names())
