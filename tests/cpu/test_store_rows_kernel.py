"""What the CPU kernel of store_rows promises beyond the contract: the bits of strange numbers, no foreign memory."""

from __future__ import annotations

import pytest
import torch

from kvbackend import UnsupportedError, backends, formats, use
from kvbackend.ops import store_rows

pytestmark = pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)

EVERY_RECORD = pytest.mark.parametrize("name", formats.record_names())
FAR = (1 << 31) - 1
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _only_the_cpu_kernels():
    with use("cpu", ops="store_rows"):
        yield


def strange_rows(width: int) -> torch.Tensor:
    """Rows of every size of number, ties of the grids, NaN, infinities and signed zeros."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(24, width, generator=generator)
    rows = noise * torch.logspace(-40, 38, 24, dtype=torch.float64)[:, None].float()
    ties = torch.randint(-24, 25, (12, width), generator=generator) / 4.0
    broken = noise[:8].clone()
    for index, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        broken[index, index::37] = value
        broken[index + 4] = value
    return torch.cat((rows, ties, noise[:4] * 0.018, broken))


def pages_of(name: str, block_size: int, rows: int) -> torch.Tensor:
    return torch.full((-(-rows // block_size) + 2, formats.record(name).page_bytes(block_size)), 0xA5).byte()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY_RECORD
def test_strange_numbers_have_the_bits_of_the_reference(name, dtype):
    record = formats.record(name)
    rows = strange_rows(sum(record.dims)).to(dtype)
    if any(field.dtype == "bfloat16" and field.name == "rope" for plane in record.planes for field in plane):
        rows[:, -64:] = rows[:, -64:].nan_to_num(7.0)  # which of its NaNs torch writes there is its own affair
    got = pages_of(name, 5, len(rows))
    want, slots = got.clone(), torch.arange(len(rows)).flip(0) + 5
    store_rows(rows, got, slots, name, 5)
    store_rows.reference(rows, want, slots, name, 5)
    assert torch.equal(got, want)


@EVERY_RECORD
def test_slots_outside_the_cache_are_skipped(name):
    width = sum(formats.record(name).dims)
    buffer = pages_of(name, 4, 16)
    before, cache = buffer.clone(), buffer[2:4]
    wrong = [-1, -2, -8, 8, 9, 15, FAR, -FAR, 1 << 62, -(1 << 63)]
    store_rows(torch.ones(len(wrong), width), cache, torch.tensor(wrong), name, 4)
    assert torch.equal(buffer, before)


def test_pages_of_strided_bytes_are_refused():
    cache = pages_of("v4_fp8_584", 4, 4).T.contiguous().T
    with pytest.raises(UnsupportedError, match=r"cache has bytes \d+ apart"):
        store_rows(torch.ones(1, 512), cache, torch.tensor([0]), "v4_fp8_584")
