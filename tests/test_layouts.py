"""Cache allocation and slot arithmetic."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbackend import ArgumentError
from kvbackend.cache import GqaLayer, MlaLayer, PagedCache
from kvbackend.layouts import FRACTAL, LAYOUTS, allocate_kv, slot_mapping, transcode


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_only_other_strides(layout: str) -> None:
    key, value = allocate_kv(5, 4, 3, 8, dtype=torch.bfloat16, layout=layout)
    assert key.shape == value.shape == (5, 4, 3, 8)
    key.zero_()
    value.fill_(1)
    assert not key.any(), "keys and values do not overlap"
    assert key.stride(-1) == 1
    strides = {"NHD": (96, 24, 8, 1), "HND": (96, 8, 32, 1), "interleaved": (192, 24, 8, 1)}
    assert key.stride() == strides[layout]


def memory_flags(tensor: Tensor) -> list[str]:
    """What Linux was told about the memory that holds the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.untyped_storage().nbytes() // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(address, 16) for address in first.split("-"))
            inside = start <= middle < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError("no memory there")


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs Linux with transparent huge pages",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_ask_for_huge_pages(layout: str) -> None:
    size = dict(num_blocks=512, block_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 16 MiB each
    for cache in allocate_kv(**size, layout=layout):
        assert "hg" in memory_flags(cache)
    layers = [GqaLayer(kv_heads=8, head_dim=128), MlaLayer(kv_lora_rank=512, qk_rope_head_dim=64)]
    cache = PagedCache(layers, num_blocks=512, block_size=16, dtype=torch.bfloat16, layout=layout)
    assert "hg" in memory_flags(cache.layers[0].key_cache)
    assert "hg" in memory_flags(cache.layers[1].ckv_cache)
    if "THP_MEM_ALLOC_ENABLE" not in os.environ:
        fresh = torch.empty(1 << 30, dtype=torch.uint8)  # more than an earlier cache can have left to malloc
        assert "hg" not in memory_flags(fresh), "flags tell nothing"


def test_small_and_fake_caches_are_like_other_tensors() -> None:
    assert allocate_kv(1, 1, 1, 8, dtype=torch.float32)[0].shape == (1, 1, 1, 8)
    assert allocate_kv(0, 1, 1, 8, dtype=torch.float32)[0].numel() == 0
    with FakeTensorMode():
        assert allocate_kv(512, 16, 8, 128, dtype=torch.bfloat16)[0].nbytes == 16 << 20


def test_wrong_layouts() -> None:
    with pytest.raises(ArgumentError, match="layout is 'NDH'"):
        allocate_kv(1, 1, 1, 1, dtype=torch.float32, layout="NDH")
    with pytest.raises(ArgumentError, match="one row size"):
        allocate_kv(1, 1, 1, 8, 4, dtype=torch.float32, layout="interleaved")


def test_slots() -> None:
    table = torch.tensor([[7, 2, -1], [0, 5, 1]], dtype=torch.int32)
    positions = torch.tensor([[0, 5, 8, -1], [3, 4, 11, -2]])
    assert slot_mapping(table, positions, 4).tolist() == [[28, 9, -1, -1], [3, 20, 7, -1]]


def test_slots_past_32_bits() -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    assert slot_mapping(table, torch.tensor([[60]]), 61).item() == (2**31 - 1) * 61 + 60


@pytest.mark.parametrize("to_layout", LAYOUTS)
@pytest.mark.parametrize("from_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
def test_split_caches_in_another_layout(from_layout: str, to_layout: str, dtype: torch.dtype) -> None:
    key, value = allocate_kv(5, 4, 3, 8, dtype=dtype, layout=from_layout)
    for seed, cache in enumerate((key, value)):
        bits = cache.view(torch.int16 if dtype is torch.bfloat16 else torch.uint8)
        bits.copy_(torch.randint(0, 255, cache.shape, generator=torch.Generator().manual_seed(seed)))
    got = transcode((key, value), from_layout, to_layout, 4)
    for one, other, like in zip(got, (key, value), allocate_kv(5, 4, 3, 8, dtype=dtype, layout=to_layout), strict=True):
        assert one.stride() == like.stride()
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        assert one.data_ptr() != other.data_ptr()


def test_records_in_another_layout() -> None:
    pages = torch.arange(2 * 656 * 3).to(torch.uint8).reshape(2, -1)
    moved = transcode(pages, "v32_fp8_656", "v32_fp8_656_ascend", 3)
    assert torch.equal(moved[:, 512:640], pages[:, 528:656])
    assert torch.equal(moved[:, 640:656], pages[:, 512:528])
    assert torch.equal(transcode(moved, "v32_fp8_656_ascend", "v32_fp8_656", 3), pages)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e8m0fnu])
def test_fractals_and_back(layout: str, dtype: torch.dtype) -> None:
    key, value = allocate_kv(5, 4, 3, 64, dtype=dtype, layout=layout)
    for seed, cache in enumerate((key, value)):
        bits = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
        bits.copy_(torch.randint(0, 255, cache.shape, generator=torch.Generator().manual_seed(seed)))
    fractals = transcode((key, value), layout, FRACTAL, 4)
    numbers = 32 // dtype.itemsize
    for pages, cache in zip(fractals, (key, value), strict=True):
        assert pages.shape == (5, 3, 64 // numbers, 4, numbers)
        assert pages.is_contiguous()
        for head, channel in ((0, 0), (2, 33), (1, 63)):  # the element of one head's channel in one token
            fractal, place = divmod(channel, numbers)
            found, wanted = pages[3, head, fractal, 2, place : place + 1], cache[3, 2, head, channel : channel + 1]
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    back = transcode(fractals, FRACTAL, layout, 4)
    for one, other in zip(back, (key, value), strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_keys_and_values_in_fractals_may_differ_in_width() -> None:
    key, value = torch.arange(48.0).reshape(1, 2, 1, 24), torch.arange(32.0).reshape(1, 2, 1, 16)
    fractals = transcode((key, value), "NHD", FRACTAL, 2)
    assert [pages.shape for pages in fractals] == [(1, 1, 3, 2, 8), (1, 1, 2, 2, 8)]
    assert all(torch.equal(*pair) for pair in zip(transcode(fractals, FRACTAL, "NHD", 2), (key, value), strict=True))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda kv: transcode(kv, "NHD", "NZ", 4), r"rows of 8 numbers; layout 'NZ' takes multiples of 16"),
        (lambda kv: transcode(kv, "NZ", "NHD", 4), r"pages of shape \[5, 4, 3, 8\]"),
        (lambda kv: transcode((torch.zeros(5, 3, 2, 4, 8),) * 2, "NZ", "NHD", 8), r"fractals, 8, 8\]"),
        (lambda kv: transcode((torch.zeros(5, 3, 2, 4, 16)[..., ::2],) * 2, "NZ", "NHD", 4), "they are dense"),
        (lambda kv: transcode(kv, "HND", "NHD", 4), "keys with strides .* in layout 'HND'"),
        (lambda kv: transcode(kv, "NHD", "HND", 8), "block_size"),
        (lambda kv: transcode(kv[0], "NHD", "HND", 4), "cache is one tensor"),
        (lambda kv: transcode(kv, "NHD", "v4_fp8_584", 4), "layouts of one kind"),
        (lambda kv: transcode(kv[0][:, :, 0, 0], "v4_fp8_584", "v4_fp8_640", 4), "record is 'v4_fp8_640'"),
        (lambda kv: transcode((kv[0], kv[1][..., :4]), "NHD", "NHD", 4), "values with strides"),
        (lambda kv: transcode((kv[0], kv[1][..., :4].contiguous()), "NHD", "interleaved", 4), "one row size"),
    ],
)
def test_what_cannot_be_transcoded(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=words):
        call(allocate_kv(5, 4, 3, 8, dtype=torch.bfloat16))
