"""Copies between pools against a plain loop, byte for byte; and that pools must be two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbackend import ArgumentError, explain, use
from kvbackend.ops import swap_blocks

from .test_copy_blocks import DTYPES, bytes_of, random_bytes


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_equals_a_loop_over_pairs(data, dtype):
    targets = data.draw(st.lists(st.integers(0, 6), unique=True, max_size=7))
    pairs = [(data.draw(st.integers(-1, 4)), data.draw(st.sampled_from([target, target, -1]))) for target in targets]
    source, target_pool = random_bytes(5, 3, 2, dtype=dtype), random_bytes(7, 3, 2, dtype=dtype)
    source_before, want = bytes_of(source).clone(), bytes_of(target_pool).clone()
    for a, b in pairs:
        if a >= 0 and b >= 0:
            want[b] = source_before[a]
    swap_blocks.reference(source, target_pool, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2))
    assert torch.equal(bytes_of(target_pool), want)
    assert torch.equal(bytes_of(source), source_before)


def test_out_and_in_again_gives_the_same_bytes():
    pool, host = random_bytes(6, 4, 3, dtype=torch.bfloat16), torch.zeros(4, 4, 3, dtype=torch.bfloat16)
    before = bytes_of(pool).clone()
    out = torch.tensor([[5, 0], [1, 3], [2, 1]])
    swap_blocks.reference(pool, host, out)
    pool[[5, 1, 2]] = torch.nan
    assert not torch.equal(bytes_of(pool), before)
    swap_blocks.reference(host, pool, out.flip(1))
    assert torch.equal(bytes_of(pool), before)


def test_pools_may_differ_in_strides():
    source = random_bytes(3, 2, 4, 5, dtype=torch.float32)
    target = torch.zeros(3, 2, 5, 4).transpose(2, 3)
    swap_blocks.reference(source, target, torch.tensor([[0, 2]]))
    assert torch.equal(bytes_of(target[2]), bytes_of(source[0]))
    assert not target[:2].any()


def test_blocks_beyond_two_to_the_31_elements():
    storage = torch.empty(2**31 + 64, dtype=torch.uint8)  # only the touched pages of it become real
    far = storage.as_strided((2, 32), (2**31, 1))
    near = torch.full((2, 32), 3, dtype=torch.uint8)
    for source, target in ((far, near), (near, far)):
        call = dict(source=source, target=target, block_mapping=torch.tensor([[1, 1]]))
        for verdict in explain(swap_blocks, **call).backends:
            if verdict.status != "refused":
                far.fill_(7)
                near.fill_(3)
                with use(verdict.name):
                    swap_blocks(**call)
                assert target[1].tolist() == [int(source[0, 0])] * 32, verdict.name
                assert target[0].ne(source[0]).all(), verdict.name


MAPPING = torch.tensor([[0, 1]])
ALL = torch.arange(24.0).reshape(6, 4)


@pytest.mark.parametrize(
    ("source", "target"),
    [(ALL, ALL), (ALL[:4], ALL[3:]), (ALL[3:], ALL[:4]), (ALL[:, :2], ALL[:, 2:]), (ALL, ALL.clone().set_(ALL))],
    ids=["itself", "a block in common", "the same, turned round", "columns of the same rows", "one storage"],
)
def test_refuses_one_pool(source, target):
    before = ALL.clone()
    with pytest.raises(ArgumentError, match=r"source and target overlap in memory; .*copy_blocks"):
        swap_blocks(source, target, MAPPING)
    assert torch.equal(ALL, before)


def test_takes_two_parts_of_one_allocation():
    memory = torch.arange(24.0).reshape(6, 4)
    with use("reference"):
        swap_blocks(memory[:3], memory[3:], MAPPING)
        assert memory[4].tolist() == memory[0].tolist() == [0, 1, 2, 3]
        with pytest.raises(ArgumentError, match="overlap"):  # although an equal call was fine
            swap_blocks(memory[:3], memory[2:5], MAPPING)
        empty = memory[:0]
        swap_blocks(memory, empty, torch.zeros(0, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_mapping=MAPPING.to("meta")), "block_mapping is on meta; it must be on the host"),
        (dict(block_mapping=MAPPING[0]), r"block_mapping has 1 dims, shape \[2\]; it must be \[n, 2\]"),
        (dict(target=torch.zeros(3, 2, 4)), r"target .*has number of page dims = 2; it must be 1"),
        (dict(target=torch.zeros(3, 5)), r"target .*has page\[0\] = 5; it must be 4"),
        (dict(target=torch.zeros(3, 4, dtype=torch.int32)), "target is torch.int32 but source is torch.float32"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match=message):
        swap_blocks(**dict(source=torch.zeros(3, 4), target=torch.zeros(3, 4), block_mapping=MAPPING) | change)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 4], [1, 4]], "block_mapping writes block 4 in its used pair 1"),
        ([[3, 0]], r"holds source block 3 at index 0; it must be in \[-1, 3\)"),
        ([[0, 1], [0, 5]], r"holds target block 5 at index 1; it must be in \[-1, 5\)"),
    ],
)
def test_values(pairs, message, monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    target = torch.zeros(5, 2)
    with use("reference"):
        swap_blocks(torch.ones(3, 2), target, torch.tensor([[2, 2], [2, 1]]))  # one number may be source and target
        with pytest.raises(ArgumentError, match=message):
            swap_blocks(torch.full((3, 2), 2.0), target, torch.tensor(pairs))
    assert target.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0], [0, 0]]
