"""Copies within a pool against a plain loop, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbackend import ArgumentError, explain, use
from kvbackend.ops import copy_blocks

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.uint16, torch.int64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def random_bytes(num_blocks: int, *page: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Any bytes, NaN of every kind among them."""
    width = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    codes = torch.randint(
        0, high, (num_blocks, *page[:-1], page[-1] * width), generator=torch.Generator().manual_seed(5)
    )
    return codes.to(torch.uint8).view(dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def apart(num_blocks: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Pairs with no block as source and target, no target twice, and some that are skipped."""

    def pairs(targets: list[int]) -> st.SearchStrategy[list[tuple[int, int]]]:
        sources = st.sampled_from([-1, *sorted(set(range(num_blocks)) - set(targets))])
        targets_or_none = [st.sampled_from([target, target, -1]) for target in targets]
        return st.tuples(*[st.tuples(sources, target) for target in targets_or_none]).map(list)

    return st.lists(st.integers(0, num_blocks - 1), unique=True, max_size=num_blocks).flatmap(pairs)


@given(pairs=apart(6), dtype=st.sampled_from(DTYPES), index=st.sampled_from([torch.int32, torch.int64]))
def test_equals_a_loop_over_pairs(pairs, dtype, index):
    cache = random_bytes(6, 3, 2, dtype=dtype)
    want = bytes_of(cache).clone()
    for source, target in pairs:
        if source >= 0 and target >= 0:
            want[target] = bytes_of(cache)[source]
    copy_blocks.reference(cache, torch.tensor(pairs, dtype=index).reshape(-1, 2))
    assert torch.equal(bytes_of(cache), want)


def test_strided_pool_keeps_its_neighbours():
    pages = random_bytes(4, 2, 3, 5, dtype=torch.float32)  # keys and values of a block side by side
    before = bytes_of(pages).clone()
    keys = pages[:, 0]
    copy_blocks.reference(keys, torch.tensor([[0, 2]]))
    before[2, 0] = before[0, 0]
    assert torch.equal(bytes_of(pages), before)


def test_a_page_may_be_one_number():
    scales = torch.tensor([3.0, 5.0, 7.0])
    copy_blocks.reference(scales, torch.tensor([[2, 0], [-1, 1]]))
    assert scales.tolist() == [7, 5, 7]


def test_a_forked_block_leaves_its_parent_alone():
    cache = torch.arange(12.0).reshape(3, 4)
    copy_blocks.reference(cache, torch.tensor([[1, 2]]))
    cache[2, -1] = 99.0
    assert cache.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 99]]


def test_blocks_beyond_two_to_the_31_elements():
    storage = torch.empty(2**31 + 64, dtype=torch.uint8)  # only the touched pages of it become real
    cache = storage.as_strided((2, 32), (2**31, 1))
    call = dict(cache=cache, block_mapping=torch.tensor([[1, 0]]))
    for verdict in explain(copy_blocks, **call).backends:
        if verdict.status != "refused":
            cache[0], cache[1] = 1, 2
            with use(verdict.name):
                copy_blocks(**call)
            assert storage[:32].tolist() == [2] * 32, verdict.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_mapping=torch.zeros(2, 3, dtype=torch.int64)), r"block_mapping \[n, 2\] has 2 = 3; it must be 2"),
        (
            dict(block_mapping=torch.zeros(2, 2)),
            "block_mapping is torch.float32; it must be torch.int32 or torch.int64",
        ),
        (dict(block_mapping=torch.zeros(2, dtype=torch.int64)), r"block_mapping has 1 dims, shape \[2\]"),
        (dict(cache=torch.zeros(())), r"cache has 0 dims, shape \[\]; it must be \[nb, \*page\]"),
        (dict(cache=torch.zeros(3, 2, device="meta")), "block_mapping is on cpu but cache is on meta"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match=message):
        copy_blocks(**dict(cache=torch.zeros(3, 2), block_mapping=torch.tensor([[0, 1]])) | change)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1], [1, 2]], "block_mapping writes block 1 in its used pair 0, which is read or written elsewhere"),
        ([[0, 1], [2, 0]], "writes block 0 in its used pair 1"),
        ([[0, 3], [-1, 2], [2, 3]], "writes block 3 in its used pair 1"),
        ([[2, 2]], "writes block 2"),
        ([[4, 0]], r"block_mapping\[:, 0\] holds source block 4 at index 0; it must be in \[-1, 4\)"),
        ([[0, 1], [0, -2]], r"block_mapping\[:, 1\] holds target block -2 at index 1"),
    ],
)
def test_values(pairs, message, monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    cache = torch.arange(8.0).reshape(4, 2)
    before = cache.clone()
    with use("reference"), pytest.raises(ArgumentError, match=message):
        copy_blocks(cache, torch.tensor(pairs))
    assert torch.equal(cache, before)
