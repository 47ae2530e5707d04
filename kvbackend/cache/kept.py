"""Which blocks of a sequence are kept in full precision beside its codes: those of its first and of its last tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from .pool import BlockPool

SEQUENCES = 8  # that the default number of blocks is made for


@dataclass
class Append:
    """What an append does to the blocks of one sequence that are kept.

    new       indices in the sequence of blocks that get one
    copied    index of the block that is copied, if it stays
    dropped   indices of blocks that lose theirs
    """

    new: list[int]
    copied: int | None
    dropped: list[int]

    @property
    def wanted(self) -> int:
        """Blocks to allocate."""
        return len(self.new) + (self.copied is not None)


class Kept:
    """The rule of `keep_recent` and `keep_sinks`, and the pool of the blocks that it asks for.

    recent       last tokens of a sequence that are kept in full precision, at least
    sinks        first tokens, likewise
    block_size   tokens of a block: the rule counts in whole blocks
    num_blocks   blocks of the cache
    keep_blocks  blocks in full precision; None: those of 8 sequences
    codes_late   a block has no codes until it leaves, so it stays through the append that fills it
    """

    def __init__(
        self,
        recent: int,
        sinks: int,
        block_size: int,
        num_blocks: int,
        keep_blocks: int | None,
        codes_late: bool = False,
    ) -> None:
        self.recent, self.sinks, self.block_size, self.codes_late = recent, sinks, block_size, codes_late
        for name, value in (("keep_recent", recent), ("keep_sinks", sinks)):
            if value < 0:
                raise ArgumentError(f"{name} is {value}; it must be 0 or more: pass how many tokens to keep")
        if keep_blocks is None:
            keep_blocks = min(num_blocks, SEQUENCES * self.blocks_per_sequence)
        if not 1 <= keep_blocks <= num_blocks:
            raise ArgumentError(
                f"keep_blocks is {keep_blocks}; it must be from 1 to num_blocks, {num_blocks}: pass "
                f"{self.blocks_per_sequence} for each sequence that may live at a time"
            )
        self.pool = BlockPool(keep_blocks, what="full-precision blocks (keep_blocks)")

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that one sequence holds at most, and one to spare while it takes the next."""
        recent = self.recent and -(-(self.recent - 1) // self.block_size) + 1
        return -(-self.sinks // self.block_size) + recent + self.codes_late + 1

    def covers(self, index: int, length: int) -> bool:
        """Whether the block at `index` has one of the first or last tokens of a sequence of that length."""
        first, end = index * self.block_size, (index + 1) * self.block_size
        return first < self.sinks or (self.recent > 0 and end > length - self.recent)

    def append(self, held: dict[int, int], length: int, count: int, copies: bool) -> Append:
        """What an append of `count` tokens does to a sequence of `length` that holds these, by index."""
        after = length + count
        start, end = -(-length // self.block_size), -(-after // self.block_size)
        last = start - 1
        filling = last if self.codes_late and length % self.block_size else None
        dropped = [index for index in held if index != filling and not self.covers(index, after)]
        copied = last if copies and last in held and last not in dropped else None
        # only blocks that begin now: a row that came before is nowhere in full precision
        first = max(start, (after - self.recent) // self.block_size) if self.recent else end
        sinks = range(start, min(end, -(-self.sinks // self.block_size)))
        new = [*sinks, *range(max(first, sinks.stop if sinks else start), end)] if count else []
        return Append(new, copied, dropped if count else [])
