"""int4 in a PagedCache: whole groups of keys are coded once, from full precision, whatever the steps they came in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbackend
from kvbackend import ArgumentError, codecs, formats
from kvbackend.cache import GqaLayer, OutOfBlocks, PagedCache

from .rows import CODES, layer_rows, nan_cache, round_trip, snapshot, tables, write

LAYER = GqaLayer(2, 64)
BLOCK = 64


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with kvbackend.use("reference", CODES):
        yield


def made(kv_format: str = "int4", **options: Any) -> PagedCache:
    return nan_cache((LAYER,), 16, BLOCK, **{"kv_format": kv_format, "keep_blocks": 16, **options})


def grow(cache: PagedCache, seq: int, start: int, *counts: int) -> int:
    for count in counts:
        write(cache, cache.append(seq, count), list(range(start, start + count)))
        start += count
    return start


def expected(cache: PagedCache, numbers: list[int], coded: int) -> list[Tensor]:
    """Rows where the first `coded` tokens, whole blocks, went through the codecs."""
    found = []
    for role, name, rows in zip(
        ("key", "value"), formats.pair(cache.kv_formats[0]), layer_rows(cache, 0, numbers), strict=True
    ):
        if name.startswith("int4"):
            back = codecs.decode(*codecs.encode(rows[:coded], name, role), name, role)
        else:
            back = round_trip(rows[:coded], name, torch.ones(1) if name == "fp8_e4m3" else None)
        found.append(torch.cat((back, rows[coded:])))
    return found


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", ["int4", "int4:64", "int4/auto", "int4/fp8_e4m3", "int8/int4", "auto/int4:32"])
@pytest.mark.parametrize("counts", [(200,), (64, 64, 72), (1,) * 70 + (130,), (63, 1, 1, 135), (128, 72)])
def test_codes_do_not_depend_on_the_steps(counts: tuple[int, ...], kv_format: str, layout: str) -> None:
    cache = made(kv_format, layout=layout, keep_recent=1)
    other = cache.new_sequence()
    grow(cache, other, 500, 3)
    seq = cache.new_sequence()
    assert grow(cache, seq, 0, *counts, 1) == 201  # the last step codes what the one before filled
    for got, want in zip(cache.read(0, seq), expected(cache, list(range(201)), 192), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("recent", "sinks", "coded"), [(0, 0, 192), (8, 0, 192), (9, 0, 128), (100, 0, 64)])
def test_a_block_is_coded_when_it_leaves_the_window(recent: int, sinks: int, coded: int) -> None:
    cache = made(keep_recent=recent, keep_sinks=sinks)
    seq = cache.new_sequence()
    grow(cache, seq, 0, 60, 139, 1)
    assert all(map(torch.equal, cache.read(0, seq), expected(cache, list(range(200)), coded)))


def test_attention_is_that_over_the_rows_read() -> None:
    cache = made(keep_recent=20, keep_sinks=5)
    seqs = [cache.new_sequence() for _ in range(2)]
    for seq, count in zip(seqs, (230, 70), strict=True):
        grow(cache, seq, 1000 * seq, count)
    torch.manual_seed(1)
    q = torch.randn(5, 4, 64)
    out, lse = cache.attend(0, q, seqs, [3, 2], 0.3, return_lse=True)
    for seq, rows in zip(seqs, (slice(0, 3), slice(3, 5)), strict=True):
        keys, values = (part.repeat_interleave(2, 1).double() for part in cache.read(0, seq))
        count = rows.stop - rows.start
        logits = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * 0.3
        seen = torch.ones(count, len(keys), dtype=torch.bool).tril(len(keys) - count)
        logits = logits.masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(lse[rows].double(), logits.logsumexp(-1).mT, rtol=1e-5, atol=1e-5)
        want = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)
        torch.testing.assert_close(out[rows].double(), want, rtol=1e-5, atol=1e-5)


def test_forks_write_groups_of_their_own() -> None:
    cache = made()
    parent = cache.new_sequence()
    grow(cache, parent, 0, 60)
    child = cache.fork(parent)
    grow(cache, child, 300, 9, 1)
    grow(cache, parent, 60, 9, 1)
    for seq, numbers in ((parent, [*range(70)]), (child, [*range(60), *range(300, 310)])):
        assert all(map(torch.equal, cache.read(0, seq), expected(cache, numbers, 64)))
    for seq in (parent, child):
        cache.free(seq)
    assert cache.kept is not None
    assert (cache.blocks_used, cache.kept.pool.num_used) == (0, 0)


def test_forks_that_share_a_full_block_code_it_alike() -> None:
    cache = made()
    parent = cache.new_sequence()
    grow(cache, parent, 0, 64)
    child = cache.fork(parent)
    grow(cache, child, 100, 1)
    assert all(map(torch.equal, cache.read(0, parent), layer_rows(cache, 0, [*range(64)])))  # still in full
    grow(cache, parent, 200, 1)
    for seq, last in ((parent, 200), (child, 100)):
        assert all(map(torch.equal, cache.read(0, seq), expected(cache, [*range(64), last], 64)))


def test_truncating_into_codes_opens_their_block_again() -> None:
    cache = made()
    seq = cache.new_sequence()
    grow(cache, seq, 0, 150)
    before = cache.read(0, seq)
    cache.truncate(seq, 100)
    assert all(torch.equal(got, want[:100]) for got, want in zip(cache.read(0, seq), before, strict=True))
    grow(cache, seq, 700, 49, 1)  # to 150: the second block is coded anew, from rows that were codes and new ones
    new = [
        torch.cat((old[:100], rows)) for old, rows in zip(before, layer_rows(cache, 0, [*range(700, 750)]), strict=True)
    ]
    again = [
        torch.cat((old[:64], codecs.decode(*codecs.encode(rows[64:128], "int4", role), "int4", role), rows[128:]))
        for role, old, rows in zip(("key", "value"), before, new, strict=True)
    ]
    keys, values = cache.read(0, seq)
    assert torch.equal(keys, again[0])
    assert torch.equal(values[100:], again[1][100:])
    assert torch.equal(values[:100], before[1][:100])  # values are coded once, row by row


def test_truncating_without_room_for_an_open_block_changes_nothing() -> None:
    cache = made(keep_blocks=2)
    seq = cache.new_sequence()
    grow(cache, seq, 0, 150)
    other = cache.fork(seq)  # holds the open block too
    grow(cache, cache.new_sequence(), 800, 2)
    before, state = snapshot(cache), (cache.blocks_used, cache.length(seq), tables(cache, [seq, other]))
    with pytest.raises(OutOfBlocks, match="full-precision"):
        cache.truncate(seq, 100)
    assert state == (cache.blocks_used, cache.length(seq), tables(cache, [seq, other]))
    assert all(map(torch.equal, snapshot(cache), before))
    cache.truncate(seq, 128)  # whole blocks stay codes


def test_keys_that_no_call_holds_in_whole_groups_are_refused() -> None:
    cache = made()
    seq = cache.new_sequence()
    slots = cache.append(seq, 200)
    before = snapshot(cache)
    with pytest.raises(ArgumentError, match=r"write holds 8 keys of groups of 32 tokens.*in one call"):
        cache.layers[0].write(slots[:40], *(rows[:40] for rows in layer_rows(cache, 0, [*range(200)])))
    assert all(map(torch.equal, snapshot(cache), before))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda call: dict(key=call["key"][:, :1], value=call["value"][:, :1]), "Hk"),
        (lambda call: dict(key=call["key"].bfloat16(), value=call["value"].bfloat16()), "torch.bfloat16"),
        (lambda call: dict(key=call["key"][:50]), "T = "),
        (lambda call: dict(value=call["value"][..., :32]), "value"),
        (lambda call: dict(slot_mapping=call["slot_mapping"].float()), "slot_mapping is torch.float32"),
        (lambda call: dict(slot_mapping=call["slot_mapping"] + 16 * BLOCK), "slot_mapping"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_any_write(change: Any, message: str) -> None:
    cache = made()
    seq = cache.new_sequence()
    key, value = layer_rows(cache, 0, [*range(200)])
    call = dict(slot_mapping=cache.append(seq, 200), key=key, value=value)
    full = cache.layers[0].full
    assert full is not None
    before = [*snapshot(cache), *(tensor.clone().view(torch.uint8) for tensor in full.pages.tensors)]
    with pytest.raises(ArgumentError, match=message):
        cache.layers[0].write(**{**call, **change(call)})
    after = [*snapshot(cache), *(tensor.view(torch.uint8) for tensor in full.pages.tensors)]
    assert all(map(torch.equal, after, before))


def test_bytes_count_codes_and_the_open_block() -> None:
    cache = made(keep_blocks=3, dtype=torch.bfloat16)
    codes, scales = 2 * 2 * 32, 2 * 2 * (64 // 32) * 4  # of a token: keys and values
    assert cache.bytes_per_token == codes + scales
    assert cache.kept_bytes_per_token == 2 * 2 * 64 * 2
    assert cache.allocated_bytes == 16 * BLOCK * (codes + scales) + 3 * BLOCK * 512
    cache.append(cache.new_sequence(), 150)
    assert cache.used_bytes == 150 * (codes + scales) + (150 - 128) * 512
