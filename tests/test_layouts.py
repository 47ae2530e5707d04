"""Cache allocation and slot arithmetic."""

from __future__ import annotations

import pytest
import torch

from kvbackend import ArgumentError
from kvbackend.layouts import LAYOUTS, allocate_kv, slot_mapping


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
