"""BlockPool against a model: a list of free ids in order, and a count of holders for each of the others."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbackend import ArgumentError
from kvbackend.cache import BlockPool, OutOfBlocks


class PoolMachine(RuleBasedStateMachine):
    """Holds lists of blocks, as sequences do, and frees them in any order."""

    @initialize(num_blocks=st.integers(0, 12), reserved=st.integers(0, 2))
    def make(self, num_blocks: int, reserved: int) -> None:
        self.pool = BlockPool(num_blocks + reserved, reserved)
        self.total = num_blocks
        self.free_ids = list(range(reserved, num_blocks + reserved))  # the next to hand out is first
        self.held: list[list[int]] = []
        self.most_used = 0

    def holders(self) -> Counter[int]:
        return Counter(block for blocks in self.held for block in blocks)

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        if count > len(self.free_ids):
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.allocate(count)
            assert (caught.value.wanted, caught.value.free, caught.value.total) == (
                count,
                len(self.free_ids),
                self.total,
            )
        else:
            blocks = self.pool.allocate(count)
            assert blocks == self.free_ids[:count]
            del self.free_ids[:count]
            self.held.append(blocks)
            self.most_used = max(self.most_used, len(self.holders()))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.held)))
        self.pool.share(iter(blocks))
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(iter(blocks))
        left = self.holders()
        self.free_ids = [block for block in blocks if block not in left] + self.free_ids

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_the_tail(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        kept = data.draw(st.integers(0, len(blocks)))
        tail = blocks[kept:]
        self.pool.free(tail)
        del blocks[kept:]
        left = self.holders()
        self.free_ids = [block for block in tail if block not in left] + self.free_ids

    def check_misuse(self) -> None:
        """A free, a reserved or an absent block together with good ones, or one once too often: nothing changes."""
        holders = self.holders()
        good = list(holders)
        for bad in set(range(-2, self.pool.num_blocks + 2)) - set(holders):
            with pytest.raises(ArgumentError):
                self.pool.share([*good, bad])
            with pytest.raises(ArgumentError):
                self.pool.free([*good, bad])
        for block, count in holders.items():
            with pytest.raises(
                ArgumentError, match=f"takes {count + 1} from the holders of block {block}; it has {count}"
            ):
                self.pool.free([block] * (count + 1))

    @invariant()
    def figures(self) -> None:
        holders = self.holders()
        assert [self.pool.ref_count(block) for block in range(self.pool.num_blocks)] == [
            holders[block] for block in range(self.pool.num_blocks)
        ]
        assert self.pool.num_used == len(holders)
        assert self.pool.num_free == len(self.free_ids)
        assert self.pool.num_free + self.pool.num_used == self.total
        assert self.pool.peak == self.most_used

    def teardown(self) -> None:
        self.check_misuse()
        self.figures()
        for blocks in self.held:
            self.pool.free(blocks)
        assert self.pool.num_free == self.total


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_freed_blocks_are_used_first_and_in_the_order_of_the_sequence() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(3)
    assert (first, second) == ([0, 1, 2], [3, 4, 5])
    pool.free(first)
    pool.free(second)
    assert pool.allocate(8) == [3, 4, 5, 0, 1, 2, 6, 7]


def test_reserved_blocks_are_never_handed_out() -> None:
    pool = BlockPool(4, reserved=1)
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.num_free, pool.num_used, pool.ref_count(0)) == (0, 3, 0)
    with pytest.raises(ArgumentError, match="block 0"):
        pool.free([0])


def test_out_of_blocks_says_what_to_do() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks are wanted; 1 of 4 are free: free or truncate other sequences"):
        pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="5 blocks are wanted; 1 of 4 are free: make the pool larger") as caught:
        pool.allocate(5)
    copy = pickle.loads(pickle.dumps(caught.value))  # a worker process hands it to its scheduler
    assert (copy.wanted, copy.free, copy.total, str(copy)) == (5, 1, 4, str(caught.value))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BlockPool(-1), "num_blocks is -1"),
        (lambda: BlockPool(2, reserved=3), "reserved is 3"),
        (lambda: BlockPool(2, reserved=-1), "reserved is -1"),
        (lambda: BlockPool(2).allocate(-1), "count is -1"),
        (lambda: BlockPool(2).ref_count(2), "block is 2; the pool has blocks 0 to 1"),
        (lambda: BlockPool(2).ref_count(-1), "block is -1"),
        (lambda: BlockPool(2).share([0]), "block 0, which nobody holds"),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
