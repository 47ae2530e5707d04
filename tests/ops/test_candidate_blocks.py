"""DeepSeek-V4.1's two levels: which blocks are candidates, and that nothing is lost while all are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbackend
from kvbackend.ops import candidate_blocks, indexer_logits, lightning_indexer
from tests.ops.test_indexer_logits import batch, draw

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def scored(rows: list[list[float]], visible: list[int], block_size: int = 4) -> dict[str, Any]:
    """One query a sequence, whose scores are the numbers given: one head, one dim, a query of 1."""
    call = batch([1] * len(rows), visible, block_size)
    width = call["block_table"].shape[1] * block_size
    keys = torch.full((len(rows), width, 1), torch.nan)
    for index, row in enumerate(rows):
        keys[index, : visible[index], 0] = torch.tensor(row[: visible[index]])
    pages = torch.empty(call["block_table"].numel(), block_size, 1)
    pages[call["block_table"].flatten().long()] = keys.view(-1, block_size, 1)
    return call | dict(q=torch.ones(len(rows), 1, 1), weights=torch.ones(len(rows), 1), key_cache=pages)


def by_formula(scores: torch.Tensor, visible: list[int], count: int, size: int) -> list[list[int]]:
    """Block ids from scores [T, n], in Python."""
    found = []
    for row, seen in zip(scores.tolist(), visible, strict=True):
        best = {}
        for j in range(seen):
            if row[j] == row[j]:
                best[j // size] = max(best.get(j // size, -float("inf")), row[j])
        if seen:
            best[(seen - 1) // size] = float("inf")
        kept = sorted((m for m in best if best[m] > -float("inf")), key=lambda m: (-best[m], m))[:count]
        found.append(sorted(kept) + [-1] * (count - len(kept)))
    return found


@BACKENDS
def test_golden(backend: str) -> None:
    """Block 2 is pinned as the newest although it is the worst; the consumer then takes the best of what is left."""
    call = scored([[0.1, 0.9, 0.3, 0.9, 0.2, 0.5, 0.7, 0.6, 0.05, 0.0]], [9])
    with kvbackend.use(backend):
        blocks = candidate_blocks(num_candidates=2, candidate_block_size=4, **call)
        assert blocks.tolist() == [[0, 2]]
        chosen = lightning_indexer(candidates=blocks, candidate_block_size=4, k=4, **call)
    assert chosen.tolist() == [[0, 1, 2, 3]]


@BACKENDS
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("ratio", [1, 2])
def test_equals_the_definition(backend: str, size: int, ratio: int) -> None:
    q_lens, lengths = [5, 1, 3, 1, 1], [61, 30, 3, 1, 0]
    call = batch(q_lens, lengths, 4, ratio)
    positions = [length - n + i for n, length in zip(q_lens, lengths, strict=True) for i in range(n)]
    visible = [max(position + 1, 0) // ratio for position in positions]
    keys = draw(0, int(call["block_table"].max()) + 1, 4, 8).float()
    call |= dict(q=draw(1, 11, 3, 8).float(), weights=draw(2, 11, 3).float(), key_cache=keys)
    with kvbackend.use(backend):
        scores = indexer_logits(**call)
        for count in (1, 2, 5, 2048):
            got = candidate_blocks(num_candidates=count, candidate_block_size=size, **call)
            assert got.shape[1] == min(count, -(-scores.shape[1] // size))
            assert got.tolist() == by_formula(scores, visible, got.shape[1], size)


@BACKENDS
def test_each_sequence_pins_its_own_newest_block(backend: str) -> None:
    lengths = [8, 9, 16, 1, 0, 33]
    call = scored([[float(40 - j) for j in range(40)]] * 6, lengths)
    with kvbackend.use(backend):
        got = candidate_blocks(num_candidates=1, **call)
    assert got.flatten().tolist() == [0, 1, 1, 0, -1, 4]


@BACKENDS
def test_nan_blocks_are_no_candidates(backend: str) -> None:
    nan = float("nan")
    row = [nan] * 8 + [1.0] + [nan] * 7 + [0.5] * 8 + [nan] * 8
    call = scored([row], [32])
    with kvbackend.use(backend):
        assert candidate_blocks(num_candidates=4, **call).tolist() == [[1, 2, 3, -1]]  # 3 is the newest
        assert candidate_blocks(num_candidates=2, **call).tolist() == [[1, 3]]


def levels(length: int, count: int = 2048, k: int = 512) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    call = batch([2, 1], [length, max(length - 7, 0)], 64)
    keys = draw(0, int(call["block_table"].max()) + 1, 64, 4).float()
    call |= dict(q=draw(1, 3, 2, 4).float(), weights=draw(2, 3, 2).float(), key_cache=keys)
    other = call | dict(q=draw(3, 3, 2, 4).float())  # the consumer's queries are its own
    blocks = candidate_blocks(num_candidates=count, **call)
    return (
        lightning_indexer(candidates=blocks, k=k, **other),
        lightning_indexer(k=k, **other),
        call | dict(blocks=blocks),
    )


@BACKENDS
@pytest.mark.parametrize("length", [2, 511, 513, 4099, 16383, 16384])
def test_two_levels_are_one_while_all_blocks_fit(backend: str, length: int) -> None:
    with kvbackend.use(backend):
        two, one, found = levels(length)
        assert torch.equal(two, one)
        blocks = found.pop("blocks")
        assert blocks[1].tolist() == [*range(-(-length // 8)), *[-1] * (blocks.shape[1] - -(-length // 8))]


@BACKENDS
def test_beyond_that_blocks_are_dropped(backend: str) -> None:
    with kvbackend.use(backend):
        two, one, found = levels(16385 + 8 * 40)
        blocks = found.pop("blocks")
        assert blocks.shape == (3, 2048)
        assert (blocks >= 0).all()
        assert blocks[:, -1].tolist() == [2087, 2088, 2087]  # the newest, partial
        assert not torch.equal(two, one)
        kept = (two[:, :, None] // 8 == blocks[:, None]).any(-1)
        assert kept.all()


@BACKENDS
def test_the_source_s_own_picks_lie_in_its_candidates(backend: str) -> None:
    """So the layer that publishes candidates may select among them, without scoring all keys twice."""
    call = batch([3, 1], [3000, 1500], 64)
    keys = draw(0, int(call["block_table"].max()) + 1, 64, 4).sign().float()  # few values: ties everywhere
    call |= dict(q=draw(1, 4, 2, 4).sign().float(), weights=draw(2, 4, 2).sign().float(), key_cache=keys)
    with kvbackend.use(backend):
        blocks = candidate_blocks(num_candidates=65, **call)
        assert torch.equal(lightning_indexer(candidates=blocks, k=64, **call), lightning_indexer(k=64, **call))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_candidates=0), "num_candidates is 0; it must be at least 1"),
        (dict(candidate_block_size=0), "candidate_block_size is 0; it must be at least 1"),
        (dict(candidate_block_size=2**31), "candidate_block_size is 2147483648; it must be below"),
        (dict(compress_ratio=0), "compress_ratio is 0; it must be at least 1"),
    ],
)
@BACKENDS
def test_wrong_calls(backend: str, change: dict[str, Any], message: str) -> None:
    good = dict(candidate_blocks.make_samples("cpu", torch.float32))["all blocks"]
    with kvbackend.use(backend):
        candidate_blocks(**good)
        with pytest.raises(kvbackend.ArgumentError, match=message):
            candidate_blocks(**(good | change))
