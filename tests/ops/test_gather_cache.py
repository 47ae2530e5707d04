"""Reading pages back: caches whose rows hold their own slot number tell which slot was read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbackend import ArgumentError, UnsupportedError, explain, use
from kvbackend.ops import concat_and_cache_mla, gather_cache, reshape_and_cache


def numbered(num_blocks: int, block_size: int, *row: int) -> torch.Tensor:
    """Each row is 1 + its slot."""
    slots = torch.arange(1, num_blocks * block_size + 1, dtype=torch.float32).reshape(num_blocks, block_size)
    return slots[(..., *[None] * len(row))].expand(-1, -1, *row).clone()


def expected(
    table: list[list[int]], lengths: list[int], starts: list[int], num_tokens: int, block_size: int
) -> list[int]:
    """What the rows of `numbered` are, token by token."""
    rows = []
    for blocks, length, start in zip(table, lengths, starts, strict=True):
        for position in range(start, start + length):
            index = position // block_size
            block = blocks[index] if index < len(blocks) else -1
            rows.append(0 if block == -1 else 1 + block * block_size + position % block_size)
    return rows + [0] * (num_tokens - len(rows))


@given(data=st.data(), block_size=st.sampled_from([1, 3, 4]), num_seqs=st.integers(0, 4))
def test_reads_the_named_slots(data, block_size, num_seqs):
    num_blocks, max_blocks = 6, data.draw(st.integers(0, 4))
    block = st.integers(-1, num_blocks - 1)
    table = [data.draw(st.lists(block, min_size=max_blocks, max_size=max_blocks)) for _ in range(num_seqs)]
    starts = [data.draw(st.integers(0, max_blocks * block_size)) for _ in range(num_seqs)]
    lengths = [data.draw(st.integers(0, max_blocks * block_size + 2 - start)) for start in starts]
    if data.draw(st.booleans()):
        starts = [0] * num_seqs
        seq_starts = None
    else:
        seq_starts = torch.tensor(starts, dtype=torch.int32)
    num_tokens = sum(lengths) + data.draw(st.integers(0, 3))
    cumulated = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tables = torch.tensor(table, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))).reshape(
        num_seqs, max_blocks
    )
    for row in ((), (2,), (3, 2)):
        cache = numbered(num_blocks, block_size, *row)
        got = gather_cache.reference(cache, tables, cumulated, num_tokens, seq_starts)
        want = torch.tensor(expected(table, lengths, starts, num_tokens, block_size), dtype=torch.float32)
        assert torch.equal(got, want.reshape(-1, *[1] * len(row)).expand(-1, *row))


@pytest.mark.parametrize("block_size", [1, 2, 16, 61])
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
def test_what_was_written_comes_back(block_size, layout):
    from kvbackend.layouts import allocate_kv, slot_mapping

    lengths, generator = [block_size, 1, 2 * block_size + 1], torch.Generator().manual_seed(3)
    num_tokens = sum(lengths)
    caches = allocate_kv(9, block_size, 2, 4, dtype=torch.bfloat16, layout=layout)
    for cache in caches:
        cache.fill_(torch.nan)
    table = torch.randperm(9, generator=generator).reshape(3, 3)
    slots = [slot_mapping(table[i : i + 1], torch.arange(n)[None], block_size)[0] for i, n in enumerate(lengths)]
    key, value = torch.randn(2, num_tokens, 2, 4, generator=generator).to(torch.bfloat16)
    reshape_and_cache.reference(key, value, *caches, torch.cat(slots))
    cumulated = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(gather_cache.reference(cache, table, cumulated, num_tokens), rows)


def test_mla_parts_come_back_from_one_fused_tensor():
    pages = torch.full((4, 3, 10), torch.nan)
    ckv, kpe = torch.randn(5, 8), torch.randn(5, 2)
    table = torch.tensor([[2, 0]])
    slots = torch.tensor([6, 7, 8, 0, 1])
    concat_and_cache_mla.reference(ckv, kpe, pages[..., :8], pages[..., 8:], slots)
    cumulated = torch.tensor([0, 5], dtype=torch.int32)
    assert torch.equal(gather_cache.reference(pages[..., :8], table, cumulated, 5), ckv)
    assert torch.equal(gather_cache.reference(pages, table, cumulated, 5), torch.cat((ckv, kpe), -1))


def test_moving_pages_changes_nothing():
    cache, order = torch.randn(8, 4, 3), torch.randperm(8, generator=torch.Generator().manual_seed(4))
    table, cumulated = torch.tensor([[1, 5, 7], [0, 2, 6]]), torch.tensor([0, 10, 15], dtype=torch.int32)
    moved = torch.empty_like(cache)
    moved[order] = cache
    want = gather_cache.reference(cache, table, cumulated, 15)
    assert torch.equal(gather_cache.reference(moved, order[table], cumulated, 15), want)


def test_stretches_join_to_the_whole():
    cache, table = torch.randn(8, 4, 3), torch.tensor([[1, 5, 7]])
    whole = gather_cache.reference(cache, table, torch.tensor([0, 11], dtype=torch.int32), 11)
    for cut in range(12):
        parts = [
            gather_cache.reference(
                cache,
                table,
                torch.tensor([0, count], dtype=torch.int32),
                count,
                torch.tensor([start], dtype=torch.int32),
            )
            for start, count in ((0, cut), (cut, 11 - cut))
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_nan_of_other_rows_and_blocks_reaches_nothing():
    cache = torch.full((3, 4, 2), torch.nan)
    cache[2, :3] = 1.0
    table = torch.tensor([[2, -1, 1 << 20]])
    got = gather_cache.reference(cache, table, torch.tensor([0, 3], dtype=torch.int32), 5)
    assert torch.equal(got, torch.tensor([1.0, 1, 1, 0, 0])[:, None].expand(-1, 2))


def test_blocks_beyond_two_to_the_31_elements():
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)  # only the touched pages of it become real
    cache = storage.as_strided((2, 2, 16), (2**31, 16, 1))
    cache.copy_(torch.arange(4.0).reshape(2, 2, 1))
    call = dict(
        cache=cache,
        block_table=torch.tensor([[1, 0]]),
        cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        num_tokens=4,
    )
    for verdict in explain(gather_cache, **call).backends:
        if verdict.status != "refused":
            with use(verdict.name):
                assert gather_cache(**call)[:, 5].tolist() == [2, 3, 0, 1], verdict.name


def call(**change: object) -> dict[str, object]:
    tables = dict(block_table=torch.tensor([[0, 1], [2, -1]]), cu_seqlens=torch.tensor([0, 5, 7], dtype=torch.int32))
    return dict(cache=numbered(4, 4, 2), num_tokens=7, **tables) | change


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_tokens=-1), "num_tokens is -1; it must be at least 0"),
        (dict(cu_seqlens=int32(1, 5, 7)), "cu_seqlens starts with 1; .*must start with 0"),
        (dict(cu_seqlens=int32(0, 5)), r"cu_seqlens \[B\+1\] has B\+1 = 2; it must be 3, the B of block_table plus 1"),
        (dict(cu_seqlens=torch.tensor([0, 5, 7])), "cu_seqlens is torch.int64; it must be torch.int32"),
        (dict(seq_starts=int32(0)), r"seq_starts \[B\] has B = 1; it must be 2"),
        (dict(cache=torch.zeros(4)), r"cache has 1 dims, shape \[4\]; it must be \[nb, bs, \*row\]"),
        (dict(kv_format="bf16"), "cache is torch.float32; kv_format 'bf16' reads torch.bfloat16"),
        (dict(scale=torch.ones(1)), "scale is given but kv_format 'auto' has no scale"),
    ],
)
def test_refuses(change, message):
    with use("reference"), pytest.raises(ArgumentError, match=message):
        gather_cache(**call(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cu_seqlens=int32(0, 5, 3)), "cu_seqlens falls"),
        (dict(num_tokens=6), "cu_seqlens ends with 7 but there are 6 tokens"),
        (dict(cu_seqlens=int32(0, 5, 14), num_tokens=14), "cu_seqlens holds an end at position 9 at index 1"),
        (dict(seq_starts=int32(0, -1)), r"seq_starts holds position -1 at index 1; it must be in \[0, 9\)"),
        (dict(seq_starts=int32(4, 0)), "an end at position 9 at index 0"),
        (
            dict(block_table=torch.tensor([[0, 4], [2, -1]])),
            r"block_table holds a block whose token has slot 16 at index 4",
        ),
    ],
)
def test_values(change, message, monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    with use("reference"), pytest.raises(ArgumentError, match=message):
        gather_cache(**call(**change))


def test_values_accept_blocks_that_no_token_is_read_from(monkeypatch):
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    unread = call(block_table=torch.tensor([[99, 1], [2, 99]]), cu_seqlens=int32(0, 4, 6), seq_starts=int32(4, 0))
    with use("reference"):
        assert gather_cache(**unread)[:, 0].tolist() == [5, 6, 7, 8, 9, 10, 0]


def test_resolved_callable_takes_any_number_of_tokens():
    with use("reference"):
        resolved = gather_cache.resolve(**call())
    assert resolved(**call(num_tokens=9)).shape == (9, 2)
    assert resolved(**call(block_table=torch.tensor([[3]]), cu_seqlens=int32(0, 1), num_tokens=1)).tolist() == [
        [13, 13]
    ]
    with pytest.raises(UnsupportedError, match="resolve"):
        resolved(**call(cache=numbered(4, 4, 2).half()))
