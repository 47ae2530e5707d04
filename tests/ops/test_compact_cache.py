"""compact_cache's reference: exact moves, and nothing else touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbackend
from kvbackend.ops import compact_cache

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e8m0fnu]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every byte pattern there is, NaN among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    return (torch.arange(count) * 37 % 256).to(torch.uint8).view(dtype).reshape(shape)


@st.composite
def moves(draw: Any) -> tuple[int, list[int], int, list[list[list[int]]]]:
    """(block size, lengths, sets, kept rows of each sequence and set)."""
    block_size = draw(st.sampled_from([1, 2, 3, 5]))
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    sets = draw(st.sampled_from([1, 2]))
    kept = [
        [sorted(draw(st.sets(st.integers(0, length - 1)))) if length else [] for _ in range(sets)] for length in lengths
    ]
    return block_size, lengths, sets, kept


@settings(max_examples=60, deadline=None)
@given(moves(), st.sampled_from(DTYPES), st.randoms(use_true_random=False))
def test_equals_moving_row_by_row(case: Any, dtype: torch.dtype, random: Any) -> None:
    block_size, lengths, sets, kept = case
    pages = [-(-length // block_size) for length in lengths]
    free = list(range(sum(pages) + 2))
    random.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in pages]
    cache = filled(dtype, sum(pages) + 2, block_size, 2, 3)
    want = bits(cache.clone())
    before = want.clone()
    for table, by_set in zip(tables, kept, strict=True):
        for h, rows in enumerate(by_set):
            part = slice(None) if sets == 1 else h
            for j, row in enumerate(rows):
                source, target = (table[row // block_size], row % block_size), (table[j // block_size], j % block_size)
                want[(*target, part)] = before[(*source, part)]
    width, longest = max([*pages, 1]), max(len(rows) for by_set in kept for rows in by_set) + 1
    compact_cache.reference(
        cache,
        torch.tensor([table + [-1] * (width - len(table)) for table in tables]),
        torch.tensor([[rows + [-1] * (longest - len(rows)) for rows in by_set] for by_set in kept]),
    )
    assert torch.equal(bits(cache), want)


def test_in_place_in_ascending_order_is_what_the_op_gives() -> None:
    """The claim that no copy is needed: a loop that writes as it reads ends the same."""
    kept = [1, 2, 5, 6, 7]
    cache = filled(torch.float32, 4, 2, 3)
    loop = cache.clone()
    table = [2, 0, 3, 1]
    for j, row in enumerate(kept):
        loop[table[j // 2], j % 2] = loop[table[row // 2], row % 2]
    compact_cache.reference(cache, torch.tensor([table]), torch.tensor([[kept]]))
    assert torch.equal(bits(cache), bits(loop))


def test_strided_pages() -> None:
    pair = filled(torch.float32, 3, 2, 4, 2, 5)
    other = pair[:, 1].clone()
    plain = pair[:, 0].clone()
    table, kept = torch.tensor([[2, 0]]), torch.tensor([[[1, 4, 7]]])
    compact_cache.reference(pair[:, 0], table, kept)
    compact_cache.reference(plain, table, kept)
    assert torch.equal(bits(pair[:, 0].clone()), bits(plain))
    assert torch.equal(bits(pair[:, 1].clone()), bits(other))


def test_bad_input_is_refused_before_any_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    cache = filled(torch.int64, 4, 2, 3, 1)
    before = cache.clone()
    table = torch.tensor([[0, 1, 2]])
    with kvbackend.use("reference"):
        for kept, message in [
            ([[[0, 1], [0, 1]]], "kept has 2 sets of rows and cache 3 kv heads; it must have one set"),
            ([[[2, 1]]], r"kept\[0, 0\] has 1 after 2; rows must ascend, with -1 only at the tail"),
            ([[[1, 1]]], r"kept\[0, 0\] has 1 after 1; rows must ascend"),
            ([[[-1, 1]]], r"kept\[0, 0\] has 1 after -1; rows must ascend"),
            ([[[0, 6]]], r"kept holds row 6 at index 1; it must be in \[-1, 6\)"),
        ]:
            with pytest.raises(kvbackend.ArgumentError, match=message):
                compact_cache(cache, table, torch.tensor(kept))
        with pytest.raises(kvbackend.ArgumentError, match="block_table holds a block whose row has slot 18"):
            compact_cache(cache, torch.tensor([[0, 9]]), torch.tensor([[[2]]]))
    assert torch.equal(cache, before)
