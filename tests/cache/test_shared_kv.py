"""SharedKvCache: bytes, one owner and many readers, forks, what may be taken back, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbackend import ArgumentError, use
from kvbackend.cache import OutOfBlocks, SharedKvCache, SharedKvLayer, deepseek_v4_layers, deepseek_v41_layers
from kvbackend.cache.shared_kv import as_stored
from kvbackend.codecs.records import unpack_record
from kvbackend.planner import plan

V4_RATIOS = [0, 0] + [4, 128] * 20 + [4]
V41_RATIOS = [0, 0] + [2] * 18 + [1] * 20
V41_SOURCES = [2, 8, 14, 20]

# scheme -> window, compressed and index format
V4_FORMATS = {
    "native": ("v4_fp8_584", "v4_fp8_584", "index_mxfp4_68"),
    "v4_fp8_584+index_fp8_132": ("v4_fp8_584", "v4_fp8_584", "index_fp8_132"),
    "bf16": ("auto", "auto", "auto"),
}
V41_FORMATS = {
    "native": ("v41_fp8_528", "v41_fp4_288", "index_mxfp4_68"),
    "v41_fp8_528": ("v41_fp8_528", "v41_fp8_528", "index_fp8_132"),
    "bf16": ("auto", "auto", "auto"),
}


@pytest.fixture(autouse=True)
def _reference():
    with use("reference", ops="store_rows"):
        yield


def formats(names: tuple[str, str, str]) -> dict[str, str]:
    return dict(zip(("window_format", "kv_format", "index_format"), names, strict=True))


def small(layers: list[SharedKvLayer] | None = None, **options: Any) -> SharedKvCache:
    """A window layer, a CSA layer and an HCA layer, all NaN."""
    if layers is None:
        layers = [SharedKvLayer(), SharedKvLayer(4, True, 3, True), SharedKvLayer(8)]
    sizes = dict(num_blocks=6, block_size=8, num_sequences=3, dtype=torch.float32, head_dim=6, window=5)
    cache = SharedKvCache(layers, **{**sizes, **options})
    for pages in cache.layers:
        for tensor in pages.by_block + pages.by_sequence:
            tensor.fill_(torch.nan)
    return cache


def ints(tensor: torch.Tensor) -> list[Any]:
    return tensor.tolist()


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("scheme", "per_token", "window"),
    [("native", 890, 2703360), ("v41_fp8_528", 1650, 2703360), ("bf16", 3200, 5242880)],
)
def test_v41_takes_the_bytes_that_were_planned(scheme, per_token, window):
    cache = SharedKvCache(
        deepseek_v41_layers(V41_RATIOS, V41_SOURCES), num_blocks=3, block_size=128, num_sequences=1,
        dtype=torch.bfloat16, **formats(V41_FORMATS[scheme]),
    )  # fmt: skip
    made = plan("deepseek-v4.1-flash", kv_format=scheme, block_size=128)
    assert cache.bytes_per_token == per_token == made.cache.per_token
    assert cache.pool_bytes == made.cache.pool_bytes(3)
    assert cache.window_bytes_per_sequence == window
    # engines keep a ring of 8 open tokens, for 7 that may be taken back; the windows have as many more rows
    cache = SharedKvCache(deepseek_v41_layers(V41_RATIOS, V41_SOURCES), 0, 128, 1, torch.bfloat16, rewind=7)
    assert cache.state_bytes_per_sequence == 98304 == made.cache.state_bytes


@pytest.mark.parametrize(
    ("scheme", "per_token"), [("native", 3514.25), ("v4_fp8_584+index_fp8_132", 3850.25), ("bf16", None)]
)
def test_v4_takes_the_bytes_that_were_planned(scheme, per_token):
    cache = SharedKvCache(
        deepseek_v4_layers(V4_RATIOS), num_blocks=3, block_size=256, num_sequences=1, dtype=torch.bfloat16,
        **formats(V4_FORMATS[scheme]),
    )  # fmt: skip
    made = plan("deepseek-v4-flash", kv_format=scheme, block_size=256)
    assert cache.bytes_per_token == (per_token or made.cache.per_token) == made.cache.per_token
    assert cache.pool_bytes == made.cache.pool_bytes(3)
    assert cache.state_bytes_per_sequence == 21 * (65536 + 16384) + 20 * 524288 == made.cache.state_bytes
    assert cache.window_bytes_per_sequence + cache.state_bytes_per_sequence == made.cache.fixed_per_sequence


def test_allocated_bytes_are_those_of_the_tensors():
    cache = small()
    every = [tensor for pages in cache.layers for tensor in pages.by_block + pages.by_sequence]
    assert cache.allocated_bytes == sum(tensor.untyped_storage().nbytes() for tensor in every)


# ----------------------------------------------------------------------------------------------------------- sharing


def test_readers_read_the_tensors_of_their_source():
    cache = SharedKvCache(deepseek_v41_layers(V41_RATIOS, V41_SOURCES), 2, 8, 1, torch.float32, head_dim=16)
    owners = {2: range(2, 8), 8: range(8, 14), 14: range(14, 20), 20: range(20, 40)}
    for owner, readers in owners.items():
        for index in readers:
            pages = cache.layers[index]
            assert pages.compressed is cache.layers[owner].compressed
            assert pages.index_keys is cache.layers[owner].index_keys
            assert (pages.state is not None) == (index == owner and index < 20)  # ratio 1 pools nothing
            assert bool(pages.by_block) == (index == owner)
    assert all(cache.layers[index].compressed is None for index in (0, 1))
    windows = {pages.window.data_ptr() for pages in cache.layers}
    assert len(windows) == 40
    assert len({cache.layers[owner].compressed.data_ptr() for owner in owners}) == 4


def test_the_layers_of_v4():
    layers = deepseek_v4_layers(V4_RATIOS)
    assert [layer.span for layer in layers[:4]] == [0, 0, 8, 128]
    assert [layer.open_tokens for layer in layers[:4]] == [0, 0, 7, 127]
    assert [layer.index_dim for layer in layers[:4]] == [0, 0, 128, 0]


def test_a_source_of_another_ratio_is_refused():
    with pytest.raises(ArgumentError, match=r"kv_source_layer_ids is \[2\]; layer 3 has compress_ratio 1"):
        deepseek_v41_layers([0, 0, 2, 1], [2])


# --------------------------------------------------------------------------------------------------------- sequences


def test_a_batch_names_blocks_rings_and_positions():
    cache = small()
    first, second = cache.new_sequence(), cache.new_sequence()
    cache.append_batch([first, second], [13, 2])
    batch = cache.batch([second, first], [2, 9])
    assert ints(batch.block_table) == [[2, -1], [0, 1]]
    assert ints(batch.window_table) == [[1], [0]]
    assert ints(batch.state_slots) == [1, 0]
    assert ints(batch.seq_lens) == [2, 13]
    assert ints(batch.cu_seqlens_q) == [0, 2, 11]
    assert batch.max_seqlen_q == 9
    assert ints(batch.positions) == [0, 1, *range(4, 13)]
    # rings of 5 rows; of 9 tokens the first 4 are overwritten by later ones of the same call
    assert ints(batch.window_slots) == [5, 6, -1, -1, -1, -1, 3, 4, 0, 1, 2]


@pytest.mark.parametrize("name", ["v4_fp8_584", "v41_fp8_528", "v41_fp8_528_planar"])
def test_windows_give_back_what_the_call_saw(name):
    cache = SharedKvCache([SharedKvLayer()], 2, 8, 2, torch.float32, window=5, window_format=name)
    cache.new_sequence()
    seq = cache.new_sequence()
    cache.append(seq, 7)
    batch, rows = cache.batch([seq], [7]), torch.randn(7, 512, generator=torch.Generator().manual_seed(0))
    pages = cache.layers[0]
    pages.write_window(rows, batch.window_slots)
    stored = unpack_record(pages.window, name, 5)[1]
    assert torch.equal(stored[[2, 3, 4, 0, 1]], pages.as_stored(rows)[2:])
    assert torch.equal(as_stored(as_stored(rows, name), name), as_stored(rows, name))
    assert not torch.equal(pages.as_stored(rows), rows)


def test_a_fork_shares_blocks_and_copies_rings():
    cache = small()
    parent = cache.new_sequence()
    cache.append(parent, 12)
    for number, tensor in enumerate(tensor for pages in cache.layers for tensor in pages.by_sequence + pages.by_block):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * number)
    child = cache.fork(parent)
    slots = [cache.batch([seq], [0]).state_slots.item() for seq in (parent, child)]
    assert slots == [0, 1]
    for pages in cache.layers:
        for tensor in pages.by_sequence:
            assert torch.equal(tensor[0], tensor[1])
            tensor[1] = -1.0
            assert (tensor[0] >= 0).all()
    assert ints(cache.batch([child], [0]).block_table) == ints(cache.batch([parent], [0]).block_table) == [[0, 1]]
    assert cache.pool.num_used == 2
    cache.append(child, 1)  # its last block has room, but is shared
    assert ints(cache.batch([child, parent], [0, 0]).block_table) == [[0, 2], [0, 1]]
    for pages in cache.layers:
        for tensor in pages.by_block:
            assert torch.equal(tensor[2], tensor[1])
    cache.append(parent, 1)  # the only holder now
    assert cache.pool.num_used == 3
    cache.free(parent)
    assert ints(cache.batch([child], [0]).block_table) == [[0, 2]]
    assert (cache.pool.num_used, cache.slots.num_used) == (2, 1)


def test_one_of_two_that_share_a_block_may_keep_it():
    cache = small()
    parent = cache.new_sequence()
    cache.append(parent, 3)
    child = cache.fork(parent)
    cache.append_batch([parent, child], [1, 1])
    assert ints(cache.batch([parent, child], [0, 0]).block_table) == [[1], [0]]
    assert cache.pool.num_used == 2


@pytest.mark.parametrize("rewind", [0, 1, 4])
def test_what_may_be_taken_back(rewind):
    """Always the last `rewind` tokens, and all of a text that the rings hold whole."""
    for length in (1, 4, 5, 9, 30):
        for keep in range(length + 1):
            cache = small(rewind=rewind)
            seq = cache.new_sequence()
            cache.append(seq, length)
            needs = [
                (max(keep - 4, 0), 4 + rewind),
                (max(keep // 4 * 4 - 4, 0), 7 + rewind),
                (keep // 8 * 8, 7 + rewind),
            ]
            possible = all(first >= length - ring or first >= keep for first, ring in needs)
            assert possible or keep < length - rewind
            if possible:
                cache.truncate(seq, keep)
                assert cache.length(seq) == keep
                assert cache.pool.num_used == -(-keep // 8)
            else:
                with pytest.raises(ArgumentError, match=f"length is {keep}; a token at that position needs the one at"):
                    cache.truncate(seq, keep)
                assert cache.length(seq) == length


def test_what_was_seen_before_a_truncation_still_counts():
    """Two steps back of one token each are two tokens back."""
    cache = small([SharedKvLayer()])
    seq = cache.new_sequence()
    cache.append(seq, 20)
    cache.truncate(seq, 19)
    with pytest.raises(ArgumentError, match="went on to 20 tokens"):
        cache.truncate(seq, 18)
    cache.truncate(seq, 0)
    cache.append(seq, 3)
    cache.truncate(seq, 1)


def test_running_out_changes_nothing():
    cache = small()
    first, second = cache.new_sequence(), cache.new_sequence()
    cache.append(first, 40)
    with pytest.raises(OutOfBlocks, match="2 blocks are wanted; 1 of 6 are free"):
        cache.append_batch([first, second], [1, 8])
    assert (cache.length(first), cache.length(second), cache.pool.num_used) == (40, 0, 5)
    cache.new_sequence()
    with pytest.raises(OutOfBlocks, match=r"1 slots of sequences \(num_sequences\) are wanted; 0 of 3 are free"):
        cache.fork(first)
    assert cache.pool.ref_count(0) == 1


def test_grows_in_place():
    layers = [SharedKvLayer(4, True, 3, True), SharedKvLayer(4, True, 3, source=0)]
    cache = small(layers, num_blocks=1)
    seq = cache.new_sequence()
    cache.append(seq, 7)
    before = [tensor.fill_(7.0) for pages in cache.layers for tensor in pages.by_block]
    rings = [tensor for pages in cache.layers for tensor in pages.by_sequence]
    with pytest.raises(OutOfBlocks):
        cache.append(seq, 2)
    cache.grow(3)
    cache.append(seq, 2)
    assert ints(cache.batch([seq], [0]).block_table) == [[0, 1]]
    for old, new in zip(before, (t for pages in cache.layers for t in pages.by_block), strict=True):
        assert len(new) == 3
        assert torch.equal(new[:1], old)
    assert cache.layers[1].compressed is cache.layers[0].compressed
    assert all(a is b for a, b in zip(rings, (t for p in cache.layers for t in p.by_sequence), strict=True))
    with pytest.raises(ArgumentError, match="num_blocks is 2; the cache has 3 and can only grow"):
        cache.grow(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_size=12), "block_size is 12; layer 2 compresses 8 tokens to a row"),
        (dict(num_sequences=0), "num_sequences is 0; it must be from 1"),
        (dict(window=0), "window is 0; it must be from 1"),
        (dict(rewind=-1), "rewind is -1; it must be from 0"),
        (dict(kv_format="v41_fp4_288"), "format 'v41_fp4_288' holds rows of 512 numbers; these have 6"),
        (dict(kv_format="v5"), "record is 'v5'"),
    ],
)
def test_refuses_sizes(change, message):
    with pytest.raises(ArgumentError, match=message):
        small(**change)


def test_refuses_calls():
    cache = small()
    seq = cache.new_sequence()
    cache.append(seq, 3)
    for call, message in (
        (lambda: cache.append(9, 1), "sequence 9 is not in the cache; it has 1"),
        (lambda: cache.append(seq, -1), "num_tokens holds -1; it must be 0 or more"),
        (lambda: cache.append_batch([seq, seq], [1, 1]), "a call takes a sequence once"),
        (lambda: cache.batch([seq, seq], [1, 1]), "a call takes a sequence once"),
        (
            lambda: cache.append_batch([seq], [1, 1]),
            "num_tokens has 2 entries for 1 sequences; it must have one for each",
        ),
        (lambda: cache.batch([seq], [4]), "q_lens asks for 4 queries of sequence 0, which has 3 tokens"),
        (lambda: cache.truncate(seq, 4), "length is 4; sequence 0 has 3 tokens"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
