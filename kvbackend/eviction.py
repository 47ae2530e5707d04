"""Which tokens a KV cache keeps: eviction policies, without torch. `EvictingCache` moves rows and frees blocks.

    policy          keeps of a sequence                                            decides
    SlidingWindow   the newest                                                     whenever it is over its budget
    StreamingLLM    the first few and the newest                                   whenever it is over its budget
    H2O             the newest, and those with the most attention so far           whenever it is over its budget
    TOVA            those that the newest query attends to                         whenever it is over its budget
    SnapKV          the newest, and those that they attend to                      once, after the prompt
    PyramidKV       as SnapKV, more in the lower layers                            once, after the prompt
    L2Norm          those whose keys have the smallest norm                        once, after the prompt

A budget counts cached rows of one sequence in one layer, forced ones included: an integer is tokens, a float is the
share of the prompt that is kept (0.25: a quarter, rounded down). A sequence of budgets is one for each layer; where it
is shorter than the model, each entry stands for as many layers in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

Budget = int | float


@dataclass(frozen=True)
class Policy:
    """What all policies share.

    budget   tokens or share of the prompt, for all layers or for each; see above

    once     it decides once, after the prompt; else whenever the budget is exceeded
    """

    budget: Budget | Sequence[Budget]

    once: ClassVar[bool] = False

    def __post_init__(self) -> None:
        budgets = self.budgets
        if not budgets:
            raise ArgumentError("budget is empty; it must be a number, or one for each layer: pass at least one")
        for budget in budgets:
            _need_budget(budget)
            if isinstance(budget, int):
                self.need_room(budget)

    @property
    def name(self) -> str:
        """As it is written."""
        return type(self).__name__

    @property
    def observes(self) -> int:
        """How many of the newest queries decide: 0 for none, -1 for all from the first on."""
        return 0

    @property
    def query_dependent(self) -> bool:
        """Whether the kept set depends on what the sequence's queries attend to."""
        return self.observes != 0

    @property
    def by_layer(self) -> bool:
        """Whether layers may keep different numbers of tokens."""
        return len(set(self.budgets)) > 1

    @property
    def by_head(self) -> bool:
        """Whether each kv head keeps tokens of its own choice, as many as the others."""
        return bool(getattr(self, "per_head", False))

    @property
    def by_position(self) -> bool:
        """Whether positions alone decide: then all layers keep the same tokens."""
        return not self.query_dependent

    @property
    def pooling(self) -> tuple[str, int]:
        """`pooling` and `kernel` of select_tokens."""
        return "none", 1

    def forced(self, budget: int) -> tuple[int, int]:
        """(first tokens, last tokens) that are kept whatever their score."""
        raise NotImplementedError

    def tokens(self, prompt: int, layer: int = 0, num_layers: int = 1) -> int:
        """The budget of one layer in tokens, for a prompt of so many."""
        budgets = self.budgets
        if num_layers % len(budgets):
            raise ArgumentError(
                f"budget has {len(budgets)} entries for {num_layers} layers; each must stand for as many layers as the "
                f"others: pass one, {num_layers}, or a number that divides {num_layers}"
            )
        return _in_tokens(budgets[layer * len(budgets) // num_layers], prompt)

    def scores(self, keys: Tensor) -> Tensor | None:
        """[Hk, rows] from keys [rows, Hk, D], where a policy chooses by keys; else None."""
        return None

    def need_room(self, budget: int, summary_slots: int = 0) -> None:
        """Raise ArgumentError where a budget in tokens cannot hold what is always kept."""
        first, last = self.forced(budget - summary_slots)
        least = max(first + last, 1) + summary_slots
        if budget < least:
            parts = [f"{first} sinks"] * (first > 0) + [f"{last} recent tokens"] * (last > 0)
            parts += [f"{summary_slots} summary slots"] * (summary_slots > 0)
            raise ArgumentError(
                f"budget is {budget} tokens; {self.name} always keeps {' and '.join(parts) or 'a token'}, so it must "
                f"be at least {least}: raise the budget, or force fewer"
            )

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """As given, one or more."""
        listed = isinstance(self.budget, Sequence) and not isinstance(self.budget, str)
        return tuple(self.budget) if listed else (self.budget,)  # type: ignore[arg-type, return-value]


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """The first `sinks` tokens and the newest: attention sinks.

    positions   "cache": keys are cached before RoPE and turned at read by their row in the cache, the query by the
                last row, so that distances never exceed the budget. "original": keys keep the RoPE of their place in
                the text
    Source: StreamingLLM (arXiv 2309.17453), section 3.2.
    """

    sinks: int = 4
    positions: str = "cache"

    def __post_init__(self) -> None:
        _need_counts(sinks=self.sinks)
        if self.positions not in ("cache", "original"):
            raise ArgumentError(
                f"positions is {self.positions!r}; it must be 'cache' or 'original': choose what RoPE turns keys by"
            )
        super().__post_init__()

    def forced(self, budget: int) -> tuple[int, int]:
        """The sinks, and at least one recent token."""
        return self.sinks, max(budget - self.sinks, 1)


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """The newest tokens only."""

    def forced(self, budget: int) -> tuple[int, int]:
        """All of the budget is recent."""
        return 0, max(budget, 1)


@dataclass(frozen=True)
class H2O(Policy):
    """Heavy hitters: the newest tokens, and of the others those with the most attention of all queries so far.

    The attention of a token is its softmax probability, summed over every query from the first on and averaged over the
    query heads of a kv head. What is dropped loses its sum.

    recent     tokens that are kept for being new; None: half of the budget, rounded down
    per_head   a set for each kv head (as published), or one for all by their mean
    Source: H2O (arXiv 2306.14048), section 4.2.
    """

    recent: int | None = None
    per_head: bool = True

    def __post_init__(self) -> None:
        _need_counts(recent=self.recent or 0)
        super().__post_init__()

    @property
    def observes(self) -> int:
        """All."""
        return -1

    def forced(self, budget: int) -> tuple[int, int]:
        """The recent tokens."""
        return 0, budget // 2 if self.recent is None else self.recent


@dataclass(frozen=True)
class TOVA(Policy):
    """The tokens that the newest query attends to most, averaged over all heads.

    recent     tokens that are kept for being new (0: even the newest may go)
    per_head   a set for each kv head, by the mean over its query heads
    Source: TOVA (arXiv 2401.06104), section 3.2.
    """

    recent: int = 0
    per_head: bool = False

    def __post_init__(self) -> None:
        _need_counts(recent=self.recent)
        super().__post_init__()

    @property
    def observes(self) -> int:
        """The newest."""
        return 1

    def forced(self, budget: int) -> tuple[int, int]:
        """The recent tokens."""
        return 0, self.recent


@dataclass(frozen=True)
class SnapKV(Policy):
    """The last `observed` tokens of the prompt, and of the others those that these attend to most, pooled.

    observed   queries at the end of the prompt that decide; they are kept too and count in the budget
    kernel     tokens that a score is pooled over, odd
    pool       "avg" or "max" ("none" with a kernel of 1)
    per_head   a set for each kv head by the mean over its query heads, or one for all by their mean
    Source: SnapKV (arXiv 2404.14469), section 4.
    """

    observed: int = 32
    kernel: int = 5
    pool: str = "avg"
    per_head: bool = True

    once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _need_counts(observed=self.observed, kernel=self.kernel)
        if self.observed < 1:
            raise ArgumentError("observed is 0; some queries must decide: pass at least 1")
        if self.kernel % 2 == 0:
            raise ArgumentError(f"kernel is {self.kernel}; it must be odd, the same on each side: pass 5 or 7")
        if self.pool not in ("avg", "max", "none"):
            raise ArgumentError(f"pool is {self.pool!r}; it must be 'avg', 'max' or 'none': choose one")
        super().__post_init__()

    @property
    def observes(self) -> int:
        """The queries at the end of the prompt."""
        return self.observed

    @property
    def pooling(self) -> tuple[str, int]:
        """As given."""
        return self.pool, self.kernel

    def forced(self, budget: int) -> tuple[int, int]:
        """The observed tokens."""
        return 0, self.observed


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall from the first layer to the last; `budget` is their average.

    With C = budget, W = observed and T tokens in the prompt, the lowest layer keeps W plus 2 (C - W) - m tokens and the
    highest W plus m, where m = (C - W) // beta (or what a prompt of few tokens leaves over); steps between layers are
    whole and equal. A prompt under C tokens is kept whole; one under 2 (C - W) tokens gives every layer C.

    beta   how steep: larger is steeper
    Source: PyramidKV (arXiv 2406.02069), section 4.2.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        if isinstance(self.budget, Sequence):
            raise ArgumentError(
                f"budget has {len(self.budget)} entries; PyramidKV derives a budget for each layer from their average: "
                f"pass one number, or use SnapKV with these budgets"
            )
        if self.beta < 1:
            raise ArgumentError(f"beta is {self.beta}; it must be 1 or more: pass 20, as published")
        super().__post_init__()

    @property
    def by_layer(self) -> bool:
        """Always."""
        return True

    def tokens(self, prompt: int, layer: int = 0, num_layers: int = 1) -> int:
        """The budget of one layer, the observed tokens included."""
        assert not isinstance(self.budget, Sequence)
        average = _in_tokens(self.budget, prompt)
        self.need_room(average)
        chosen = average - self.observed
        if prompt < max(average, 2 * chosen) or num_layers == 1:
            return average
        least = chosen // self.beta
        most = 2 * chosen - least
        if most >= prompt - self.observed:
            most = prompt - self.observed
            least = 2 * chosen - most
        return most - layer * ((most - least) // (num_layers - 1)) + self.observed


@dataclass(frozen=True)
class L2Norm(Policy):
    """The tokens whose keys have the smallest norm, which tend to get the most attention.

    sinks, recent   first and last tokens that are kept whatever their norm
    per_head        a set for each kv head (as published), or one for all by the mean of their norms
    Source: L2-norm compression (arXiv 2406.11430), section 3.
    """

    sinks: int = 0
    recent: int = 0
    per_head: bool = True

    once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _need_counts(sinks=self.sinks, recent=self.recent)
        super().__post_init__()

    @property
    def by_position(self) -> bool:
        """Keys decide."""
        return False

    def forced(self, budget: int) -> tuple[int, int]:
        """As given."""
        return self.sinks, self.recent

    def scores(self, keys: Tensor) -> Tensor:
        """Minus the norm."""
        return -keys.float().norm(dim=-1).mT


def _in_tokens(budget: Budget, prompt: int) -> int:
    return budget if isinstance(budget, int) else int(budget * prompt)


def _need_budget(budget: Any) -> None:
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ArgumentError(f"budget is {budget!r}; it must be a number of tokens or a share of the prompt: pass one")
    if isinstance(budget, int) and budget < 1:
        raise ArgumentError(f"budget is {budget} tokens; it must be 1 or more: pass how many tokens to keep")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ArgumentError(
            f"budget is {budget}; a float is the share of the prompt that is kept, above 0 and at most 1: pass a "
            f"share, or an integer for tokens"
        )


def _need_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ArgumentError(f"{name} is {count}; it must be 0 or more: pass a count of tokens")
