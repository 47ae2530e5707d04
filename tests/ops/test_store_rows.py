"""store_rows: the golden bytes of records, the rows that come back out of them, and what it leaves alone."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kvbackend import ArgumentError, formats, use
from kvbackend.codecs.records import pack_record, unpack_record
from kvbackend.ops import store_rows

SHARED_KV = [name for name in formats.record_names() if formats.record(name).holds == "shared_kv"]


@pytest.fixture(autouse=True)
def _reference():
    with use("reference", ops="store_rows"):
        yield


def exact_rows(count: int, width: int) -> torch.Tensor:
    """Numbers that bfloat16 holds exactly, another scale for each row."""
    column, row = torch.arange(width), torch.arange(count)[:, None]
    return ((37 * column + 53 * row) % 101 - 50) / 16.0 * 2.0**row


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def poisoned(name: str, num_blocks: int, block_size: int) -> torch.Tensor:
    return torch.full((num_blocks, formats.record(name).page_bytes(block_size)), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "width", "row_bytes", "golden"),
    [
        ("v4_fp8_584", 512, 2336, "5fe1dc8297ae0870"),
        ("v4_fp8_640_ascend", 512, 2560, "1c17a3be99741989"),
        ("v41_fp8_528", 512, 2112, "911da7eaee123318"),
        ("v41_fp8_528_planar", 512, 2112, "defe6ccfb703ce54"),
        ("v41_fp4_288", 512, 1152, "ea25ad1d2dab3934"),
        ("v41_fp4_288_planar", 512, 1152, "3543a3798cf95fbb"),
        ("index_fp8_132", 128, 528, "9e283c204237c79a"),
        ("index_mxfp4_68", 128, 272, "508daba72b034d16"),
    ],
)
def test_golden_bytes(name, width, row_bytes, golden):
    cache = poisoned(name, 3, 4)
    slots = torch.tensor([6, 4, 7, 5])
    store_rows(exact_rows(4, width)[[2, 0, 3, 1]], cache, slots, name, block_size=4)
    assert digest(cache[1, :row_bytes]) == golden
    assert (cache[[0, 2]] == 0xFF).all()
    assert (cache[1, row_bytes:] == 0xFF).all()  # padding is nobody's


@pytest.mark.parametrize("block_size", [1, 2, 5, 64])
@pytest.mark.parametrize("name", SHARED_KV)
def test_rows_come_back_wherever_they_were_put(name, block_size):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 512, generator=generator)
    num_blocks = -(-20 // block_size)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:9]
    cache = poisoned(name, num_blocks, block_size)
    store_rows(rows, cache, slots, name)
    got = unpack_record(cache, name, block_size).flatten(0, 1)
    want = unpack_record(pack_record(rows[:, None], name), name, 1)[:, 0]
    assert torch.equal(got[slots], want)
    untouched = torch.ones(len(got), dtype=torch.bool)
    untouched[slots] = False
    assert got[untouched].isnan().any(-1).all()


def test_slots_without_a_row_stay():
    cache = torch.full((4, 16, 6), torch.nan)
    store_rows(torch.ones(3, 6), cache, torch.tensor([-1, 3, -1]))
    assert (cache[0, 3] == 1).all()
    assert cache.isfinite().sum() == 6


def test_offsets_beyond_32_bits():
    """Blocks so far apart that an element's offset does not fit; the memory between them is never touched."""
    stride = 2**31 + 64
    cache = torch.empty(stride + 64, dtype=torch.float16).as_strided((2, 4, 16), (stride, 16, 1)).fill_(torch.nan)
    store_rows(torch.ones(1, 16, dtype=torch.float16), cache, torch.tensor([4 + 2]))
    assert (cache[1, 2] == 1).all()
    assert cache.isfinite().sum() == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_format="v5"), "record is 'v5'; it must be one of"),
        (dict(kv_format="v4_fp8_584"), r"cache is torch.float32 with 3 dims; records of 'v4_fp8_584' are torch.uint8"),
        (dict(cache=torch.zeros(2, 4, 511)), "cache holds rows of 511 numbers; rows has 512"),
        (dict(cache=torch.zeros(2, 4, 512).half()), "cache is torch.float16 but rows is torch.float32"),
        (dict(cache=torch.zeros(2, 2048)), "cache has 2 dims; kv_format 'auto' has"),
        (
            dict(kv_format="v4_fp8_584", cache=torch.zeros(2, 2337, dtype=torch.uint8)),
            "cache has pages of 2337 bytes; 4 rows of 'v4_fp8_584' take 2880",
        ),
        (
            dict(kv_format="index_fp8_132", cache=torch.zeros(2, 528, dtype=torch.uint8)),
            "rows has rows of 512 numbers; 'index_fp8_132' holds 128",
        ),
        (dict(slot_mapping=torch.zeros(4, dtype=torch.int64)), "slot_mapping .*has T = 4; it must be at most 3"),
    ],
)
def test_refuses(change, message):
    call = dict(rows=torch.ones(3, 512), cache=torch.zeros(2, 4, 512), slot_mapping=torch.tensor([0, 1, 2])) | change
    with pytest.raises(ArgumentError, match=message):
        store_rows(**call)


def test_values(monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    cache = poisoned("v41_fp8_528", 2, 4)
    with pytest.raises(ArgumentError, match=r"slot_mapping holds slot 8 at index 1; it must be in \[-1, 8\)"):
        store_rows(torch.ones(2, 512), cache, torch.tensor([0, 8]), "v41_fp8_528")
    assert (cache == 0xFF).all()
