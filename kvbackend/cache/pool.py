"""Which blocks of a paged cache are free, and who holds the others. Block ids and counts only: no torch, no pages.

Order of reuse as in vLLM: fresh blocks in order of their ids; blocks that were freed before those never used, the last
freed first; within one call to `free` the first block named is the first to be handed out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import index

from ..errors import ArgumentError
from ..typed import checked, kind_of, need, need_sizes

MAX_BLOCKS = 2**31 - 1  # block tables are int32


class OutOfBlocks(RuntimeError):  # noqa: N818  (a state that callers handle, by preempting or waiting, not a mistake)
    """The pool has fewer free blocks than were asked for; nothing was changed.

    wanted   blocks asked for
    free     blocks that were free
    total    blocks that the pool can hand out
    what     what they are called
    """

    def __init__(self, wanted: int, free: int, total: int, what: str = "blocks") -> None:
        self.wanted, self.free, self.total, self.what = wanted, free, total, what
        if wanted <= total:
            remedy = "free or truncate other sequences and try again, or make the pool larger"
        else:
            remedy = "make the pool larger, or ask for less: this can never fit"
        super().__init__(f"{wanted} {what} are wanted; {free} of {total} are free: {remedy}")

    def __reduce__(self) -> tuple[type[OutOfBlocks], tuple[int, int, int, str]]:
        return type(self), (self.wanted, self.free, self.total, self.what)


class BlockPool:
    """Hands out the block ids `reserved` .. `num_blocks` - 1 and counts the holders of each.

    num_blocks   blocks of the cache, the reserved ones included
    reserved     blocks at the start that are never handed out: some kernels read block 0 as "no block"
    what         what messages call its blocks

    A block is written in place only while its reference count is 1; whoever wants to write a shared one allocates
    another, copies the pages, and frees the shared one (copy-on-write, which PagedCache does).
    Every call does all it says or raises and changes nothing. Not thread-safe: one thread owns a pool, or a lock does.
    Source: vLLM's block pool (arXiv 2309.06180, section 4.3).
    """

    @checked
    def __init__(self, num_blocks: int, reserved: int = 0, what: str = "blocks") -> None:
        num_blocks, reserved = index(num_blocks), index(reserved)
        if not 0 <= reserved <= num_blocks:
            raise ArgumentError(
                f"num_blocks is {num_blocks} and reserved is {reserved}; reserved must be from 0 to num_blocks: "
                f"pass the number of blocks in the cache, and how many at its start to keep out of use"
            )
        need_sizes(self, 0, MAX_BLOCKS, num_blocks=num_blocks)
        self.num_blocks = num_blocks
        self.reserved = reserved
        self.what = what
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, reserved - 1, -1))  # a stack: the next to hand out is last
        self._peak = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder. num_free + num_used = num_blocks - reserved."""
        return self.num_blocks - self.reserved - len(self._free)

    @property
    def peak(self) -> int:
        """The largest num_used so far."""
        return self._peak

    def ref_count(self, block: int) -> int:
        """Holders of a block: 0 for a free or a reserved one."""
        return self._ref_counts[self._id(block)]

    @checked
    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder. Raises OutOfBlocks if there are fewer."""
        count = index(count)
        if count < 0:
            raise ArgumentError(f"count is {count}; it must be 0 or more: pass the number of blocks to add")
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free), self.num_blocks - self.reserved, self.what)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        self._peak = max(self._peak, self.num_used)
        return blocks

    @checked
    def grow(self, num_blocks: int) -> None:
        """Have so many blocks from now on; ids that are in use stay as they are."""
        num_blocks = index(num_blocks)
        if num_blocks < self.num_blocks:
            raise ArgumentError(
                f"num_blocks is {num_blocks}; the pool has {self.num_blocks} and can only grow: pass at least that"
            )
        need_sizes(self, 0, MAX_BLOCKS, num_blocks=num_blocks)
        self._free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)  # handed out after those that are free now
        self._ref_counts += [0] * (num_blocks - self.num_blocks)
        self.num_blocks = num_blocks

    @checked
    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these blocks, all in use; one named twice gets two."""
        blocks = tuple(map(self._id, blocks))
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise ArgumentError(
                    f"share names block {block}, which nobody holds; only a block in use can be shared: allocate it"
                )
        for block in blocks:
            self._ref_counts[block] += 1

    @checked
    def free(self, blocks: Iterable[int]) -> None:
        """Take a holder from each of these blocks, in the order of a sequence; those without one become free."""
        blocks = tuple(map(self._id, blocks))
        for block, mentions in Counter(blocks).items():
            if self._ref_counts[block] < mentions:
                raise ArgumentError(
                    f"free takes {mentions} from the holders of block {block}; it has {self._ref_counts[block]}: "
                    f"free a block once for each time that it was allocated or shared"
                )
        for block in reversed(blocks):  # the tail first, so that the head is handed out again first
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def _id(self, block: int) -> int:
        need("block", block, kind_of(int))
        if not 0 <= block < self.num_blocks:  # a negative id would count from the end
            raise ArgumentError(
                f"block is {block}; the pool has blocks 0 to {self.num_blocks - 1}: pass an id from allocate"
            )
        return index(block)

    def __repr__(self) -> str:
        return f"<BlockPool: {self.num_used} of {self.num_blocks - self.reserved} blocks in use, peak {self._peak}>"
