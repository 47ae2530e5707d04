"""csrc/cuda without CUDA: its kernels run thread by thread on the CPU, and its host side is called as it is.

This proves which bytes go where. Races, launches and streams do not show.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbackend import codegen, formats
from kvbackend.matrix import DTYPES, copy_arguments, difference
from kvbackend.ops import registry

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "c++")

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"there is no C++ compiler: {CXX}")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "records.inc").write_text(codegen.records_table())
    target = folder / "emulated.so"
    command = [CXX, "-std=c++17", "-O2", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-shared", "-fPIC"]
    command += ["-DKVBACKEND_ISA=cuda", f"-I{folder}", str(HERE / "emulated.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(target))
    for name in ("copy_blocks", "copies", "transcode"):
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def numbers(values: Any) -> Any:
    values = list(values)
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def pool_arguments(source: torch.Tensor, target: torch.Tensor) -> list[Any]:
    """Element bytes, dims, sizes, strides of a page, and strides from block to block."""
    sizes = [numbers(target.shape[1:]), numbers(source.stride()[1:]), numbers(target.stride()[1:])]
    return [
        ctypes.c_int64(source.element_size()), ctypes.c_int64(target.dim() - 1), *sizes,
        ctypes.c_int64(source.stride(0)), ctypes.c_int64(target.stride(0)),
    ]  # fmt: skip


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def by_kernel(library: ctypes.CDLL, way: int, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> int:
    pairs = pairs.to(torch.int32 if way == 2 else torch.int64)
    row, column = (ctypes.c_int64(stride) for stride in pairs.stride())
    return library.copy_blocks(
        way, address(source), address(target), *pool_arguments(source, target), address(pairs), row, column,
        ctypes.c_int64(len(pairs)),
    )  # fmt: skip


def by_copies(library: ctypes.CDLL, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> int:
    pairs = pairs.long().contiguous()
    return library.copies(
        address(source), address(target), *pool_arguments(source, target), address(pairs), ctypes.c_int64(len(pairs))
    )


def calls(name: str) -> list[Any]:
    return [
        pytest.param(args, id=f"{sample}, {str(dtype).removeprefix('torch.')}")
        for dtype in DTYPES
        for sample, args in registry[name].make_samples("cpu", dtype)
        if 0 not in args["cache" if name == "copy_blocks" else "source"].shape
    ]


@pytest.mark.parametrize("way", [1, 2])
@pytest.mark.parametrize("args", calls("copy_blocks"))
def test_copy_blocks_equals_the_reference(args, way, library) -> None:
    want, got = copy_arguments(args), copy_arguments(args)
    registry["copy_blocks"].reference(**want)
    by_kernel(library, way, got["cache"], got["cache"], got["block_mapping"])
    assert not difference(got["cache"], want["cache"])


@pytest.mark.parametrize("way", ["kernel", "copies"])
@pytest.mark.parametrize("args", calls("swap_blocks"))
def test_swap_blocks_equals_the_reference(args, way, library) -> None:
    want, got = copy_arguments(args), copy_arguments(args)
    registry["swap_blocks"].reference(**want)
    pools = got["source"], got["target"], got["block_mapping"]
    by_copies(library, *pools) if way == "copies" else by_kernel(library, 0, *pools)
    assert not difference(got["target"], want["target"])


@pytest.mark.parametrize(("first", "width", "unit"), [(0, 64, 16), (8, 64, 8), (4, 60, 4), (2, 6, 2), (1, 7, 1)])
def test_units_are_as_wide_as_everything_is_aligned(first, width, unit, library) -> None:
    source = torch.randint(0, 255, (4, 128), dtype=torch.uint8)
    target = torch.zeros(4, 128, dtype=torch.uint8)
    pages = slice(first, first + width)
    pairs = torch.tensor([[0, 3], [-1, 2], [2, 1]])
    assert source.data_ptr() % 16 == target.data_ptr() % 16 == 0
    assert by_kernel(library, 0, source[:, pages], target[:, pages], pairs) == unit
    assert torch.equal(target[3, pages], source[0, pages])
    assert torch.equal(target[1, pages], source[2, pages])
    target[3, pages] = target[1, pages] = 0
    assert not target.any()


def test_many_units_and_many_dims(library) -> None:
    """More than one block of threads in a page, and four strided dims."""
    wide = torch.randint(0, 255, (3, 50_000), dtype=torch.uint8)
    target = torch.zeros_like(wide)
    by_kernel(library, 1, wide, target, torch.tensor([[2, 0]]))
    assert torch.equal(target[0], wide[2])
    source = torch.arange(2 * 6 * 5 * 4 * 3 * 2).reshape(2, 6, 5, 4, 3, 2).short()[:, ::2, :, ::3, :, :1]
    target = torch.zeros(2, 3, 5, 2, 3, 1, dtype=torch.short)
    by_kernel(library, 0, source, target, torch.tensor([[1, 0], [0, 1]]))
    assert torch.equal(target, source.flip(0))


def test_copies_that_follow_each_other_are_one(library) -> None:
    """What is batched: a copy for each run, and one for runs of neighbours."""
    source = torch.randn(8, 4, 2, 16)
    target = torch.zeros(8, 4, 2, 16)
    neighbours = torch.tensor([[0, 3], [1, 4], [2, 5], [6, 7], [-1, 0], [7, 0]])
    assert by_copies(library, source, target, neighbours) == 3
    assert torch.equal(target[3:6], source[:3])
    heads_first = torch.zeros(8, 2, 4, 16).transpose(1, 2)  # a run for each token of each head
    assert by_copies(library, source, heads_first, torch.tensor([[1, 0]])) == 8
    half = torch.zeros(8, 4, 2, 32)[..., :16]
    assert by_copies(library, source, half, torch.tensor([[1, 0], [2, 1]])) == 16
    assert by_copies(library, half, torch.zeros(8, 4, 2, 32)[..., 16:], torch.tensor([[1, 0]])) == 8


def transcoded(library: ctypes.CDLL, pages, from_layout, to_layout, block_size) -> tuple[torch.Tensor, list[int]]:
    out = torch.full((len(pages), formats.record(to_layout).page_bytes(block_size)), 0xA5, dtype=torch.uint8)
    widths = (ctypes.c_int64 * 8)()
    count = library.transcode(
        address(pages), address(out), from_layout.encode(), to_layout.encode(), ctypes.c_int64(block_size),
        ctypes.c_int64(len(pages)), ctypes.c_int64(pages.stride(0)), widths,
    )  # fmt: skip
    return out, list(widths)[: max(count, 0)]


@pytest.mark.parametrize(("sample", "args"), dict(registry["transcode"].make_samples("cpu", torch.float32)).items())
def test_transcode_equals_the_reference(sample, args, library) -> None:
    got, _ = transcoded(library, **args)
    assert torch.equal(got, registry["transcode"].reference(**args))


def test_transcode_moves_16_bytes_where_fields_are_aligned(library) -> None:
    pages = torch.randint(0, 256, (8, formats.record("v4_fp8_584").page_bytes(64)), dtype=torch.uint8)
    _, widths = transcoded(library, pages, "v4_fp8_584", "v4_fp8_640_ascend", 64)
    assert sorted(widths) == [1, 1, 16, 16]  # 7 scales and 57 bytes of padding; codes and rotary part


def test_transcode_gives_every_power_of_two(library) -> None:
    """All bytes as scales, of records that store them as bfloat16: 2^-127 to 2^127, and NaN."""
    pages = torch.zeros(256, formats.record("v4_fp8_584_ascend").page_bytes(1), dtype=torch.uint8)
    pages[:, 576:583] = torch.arange(256, dtype=torch.uint8)[:, None]
    got, _ = transcoded(library, pages, "v4_fp8_584_ascend", "v4_fp8_608_ascend", 1)
    scales = got[:, 576:590].contiguous().view(torch.bfloat16)
    assert torch.equal(
        scales[:255], (2.0 ** (torch.arange(255.0, dtype=torch.float64) - 127)).bfloat16()[:, None].expand(-1, 7)
    )
    assert scales[255].isnan().all()


def test_records_that_do_not_fit_are_refused(library) -> None:
    pages = torch.zeros(1, formats.record("v4_fp8_584").page_bytes(4), dtype=torch.uint8)
    _, widths = transcoded(library, pages, "v4_fp8_584", "v41_fp8_528", 4)
    assert not widths
