"""What reshape_and_cache writes, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

import kvbackend
from kvbackend.layouts import LAYOUTS, allocate_kv
from kvbackend.ops import reshape_and_cache


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", [[-1, 3, -1], [-1, -1, -1], [0, 11, 5], [11, -1, 0]])
def test_every_byte_of_the_cache(backend: str, layout: str, slots: list[int]) -> None:
    """Named rows hold the token's numbers; every other byte is as it was, the last slot's among them."""
    caches = allocate_kv(3, 4, 2, 8, dtype=torch.float32, layout=layout)
    for cache in caches:
        cache.copy_(torch.randn(3, 4, 2, 8))
    rows = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    want = [cache.clone() for cache in caches]
    for expected, values in zip(want, rows, strict=True):
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // 4, slot % 4] = values[token]
    with kvbackend.use(backend):
        reshape_and_cache(*rows, *caches, torch.tensor(slots))
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nothing_is_written_by_a_wrong_call(backend: str) -> None:
    key, cache = torch.ones(2, 2, 8), torch.zeros(3, 4, 2, 8)
    slots = torch.tensor([0, 1])
    wrong = [
        dict(value=torch.ones(2, 3, 8)), dict(value=torch.ones(3, 2, 8)), dict(value=torch.ones(2, 2, 8).half()),
        dict(slot_mapping=torch.tensor([0, 1, 2])), dict(slot_mapping=slots.float()), dict(slot_mapping=slots[None]),
        dict(value_cache=torch.zeros(2, 4, 2, 8)), dict(k_scale=torch.ones(1)), dict(kv_format="fp8"),
    ]  # fmt: skip
    good = dict(key=key, value=key, key_cache=cache, value_cache=cache.clone(), slot_mapping=slots)
    with kvbackend.use(backend):
        for change in wrong:
            with pytest.raises(kvbackend.ArgumentError, match=next(iter(change))):
                reshape_and_cache(**(good | change))
        assert not cache.any()
        reshape_and_cache(**good)
        assert cache.any()
