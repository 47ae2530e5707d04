"""Records in each other's order: there and back to the bit, refusals, and what the numbers are afterwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbackend
from kvbackend import backends, formats
from kvbackend.codecs import pack_record, split_pages, unpack_record
from kvbackend.codecs.records import why_not
from kvbackend.ops import transcode

NAMES = formats.record_names()
PAIRS = [(a, b) for a in NAMES for b in NAMES if why_not(formats.record(a), formats.record(b)) is None]
# Written down, so that a new record or rule cannot add a pair, or lose one, unseen.
ORDERS = [
    {"v32_fp8_656", "v32_fp8_656_ascend"},
    {"v32_nvfp4_352"},
    {"v4_fp8_584", "v4_fp8_584_ascend", "v4_fp8_640_ascend"},
    {"v4_fp8_608_ascend"},
    {"v41_fp8_528", "v41_fp8_528_planar"},
    {"v41_fp4_288", "v41_fp4_288_planar"},
    {"index_fp8_132", "v41_index_fp8_132"},
    {"index_mxfp4_68", "v41_index_mxfp4_68"},
    {"index_int8_130"},
]
ONE_WAY = {(source, "v4_fp8_608_ascend") for source in ORDERS[2]}


@pytest.fixture(params=["reference", "cpu"], autouse=True, scope="module")
def backend(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    reasons = backends.registered()["cpu"].missing() if request.param == "cpu" else ()
    if reasons:
        pytest.skip("; ".join(reasons))
    with kvbackend.use(request.param):
        yield


def test_pairs() -> None:
    assert set(PAIRS) == {(a, b) for order in ORDERS for a in order for b in order} | ONE_WAY


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PAIRS), st.integers(0, 3), st.integers(1, 9), st.integers(0, 2**31))
def test_any_bytes_come_back(pair: tuple[str, str], num_blocks: int, block_size: int, seed: int) -> None:
    """NaN and unused codes included; only padding changes, to zero."""
    source, target = map(formats.record, pair)
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 256, (num_blocks, source.page_bytes(block_size)), generator=generator, dtype=torch.uint8)
    moved = transcode(pages, *pair, block_size)
    assert moved.shape == (num_blocks, target.page_bytes(block_size))
    have, want = split_pages(moved, target, block_size), split_pages(pages, source, block_size)
    for name in have:
        if pair not in ONE_WAY or name != "scales":
            assert torch.equal(have[name].view(torch.uint8), want[name].view(torch.uint8)), name
    data = block_size * (target.data_bytes + target.scale_bytes) * num_blocks
    assert int(moved.ne(0).sum()) <= data, "padding is zero"
    got = unpack_record(moved, target.name, block_size)
    assert torch.equal(got.nan_to_num(7.0), unpack_record(pages, source.name, block_size).nan_to_num(7.0))
    if pair not in ONE_WAY:
        back = transcode(moved, *reversed(pair), block_size)
        again = split_pages(back, source, block_size)
        assert all(torch.equal(again[name].view(torch.uint8), want[name].view(torch.uint8)) for name in want)
        assert torch.equal(transcode(back, *pair, block_size), moved)


@pytest.mark.parametrize("pair", PAIRS)
def test_what_one_engine_packs_the_other_would_have_packed(pair: tuple[str, str]) -> None:
    width = sum(formats.record(pair[0]).dims)
    rows = torch.randn(3, 4, width, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(transcode(pack_record(rows, pair[0]), *pair, 4), pack_record(rows, pair[1]))


def test_every_power_of_two_is_a_bfloat16() -> None:
    """Byte 0 is 2^-127, a subnormal; 255 is NaN, to the same bits for everyone."""
    record = formats.record("v4_fp8_584_ascend")
    pages = torch.zeros(1, 37 * record.row_bytes, dtype=torch.uint8)
    every = torch.arange(259).clamp(max=255).to(torch.uint8).reshape(37, 7)
    pages.view(37, record.row_bytes)[:, 576:583] = every
    moved = transcode(pages, record.name, "v4_fp8_608_ascend", 37)
    got = split_pages(moved, formats.record("v4_fp8_608_ascend"), 37)["scales"].flatten()
    want = torch.pow(2.0, every.flatten().double() - 127)
    assert torch.equal(got[every.flatten() < 255].double(), want[every.flatten() < 255])
    assert (got[every.flatten() == 255].view(torch.int16) == 0x7FC0).all()


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("v4_fp8_608_ascend", "v4_fp8_584", ("scales in bfloat16 may be any number", "can become no other")),
        ("v4_fp8_584", "v41_fp8_528", ("has other codes", "v4_fp8_584_ascend, ")),
        ("v41_fp8_528", "v41_fp4_288", ("has other codes", "v41_fp8_528_planar")),
        ("v32_fp8_656", "v4_fp8_584", ("holds shared_kv", "v32_fp8_656_ascend")),
        ("index_fp8_132", "index_mxfp4_68", ("has other codes", "pack_record")),
        ("v32_fp8_656", "NHD", ("record is 'NHD'", "v4_fp8_584")),
    ],
)
def test_pairs_that_would_lose_something_are_refused(source: str, target: str, words: tuple[str, ...]) -> None:
    pages = torch.zeros(2, formats.record(source).page_bytes(4), dtype=torch.uint8)
    with pytest.raises(kvbackend.ArgumentError) as caught:
        transcode(pages, source, target, 4)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_pages_of_another_size_or_dtype_are_refused() -> None:
    pages = torch.zeros(2, 656 * 4, dtype=torch.uint8)
    for call, words in (
        (lambda: transcode(pages, "v32_fp8_656", "v32_fp8_656_ascend", 5), "with 5 rows has 3280"),
        (lambda: transcode(pages.float(), "v32_fp8_656", "v32_fp8_656_ascend", 4), "pages is torch.float32"),
        (lambda: transcode(pages, "v32_fp8_656", "v32_fp8_656_ascend", 0), "block_size is 0"),
    ):
        with pytest.raises(kvbackend.ArgumentError, match=words):
            call()


def test_pages_whose_bytes_lie_apart_are_left_to_the_reference() -> None:
    pages = torch.arange(2 * 656).to(torch.uint8).reshape(656, 2).T
    call = dict(pages=pages, from_layout="v32_fp8_656", to_layout="v32_fp8_656_ascend", block_size=1)
    assert "bytes 2 apart" in list(backends.registered()["cpu"].adapter("transcode").unsupported(**call))[-1]
    with kvbackend.use("reference"):
        assert torch.equal(transcode(**call), transcode(**call | dict(pages=pages.contiguous())))
