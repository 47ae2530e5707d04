"""Where the time of attention over a cache goes, stage by stage, and what to do where choosing takes too much of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

# codec      coding or projecting new keys and values as they are written; nothing for numbers, which are copied. Codes
#            that are read become numbers in registers: that is part of the stage that reads them
# index      scoring, and learning what it rests on: of what is attended to, or of what eviction keeps
# top_k      choosing the best
# gather     rows that are moved: reconstructed from low rank to be read, or to the front when others were evicted;
#            nothing where they are read in place
# attention  what is left, which is all of dense attention
STAGES = ("codec", "index", "top_k", "gather", "attention")
CHOOSING = ("index", "top_k", "gather")
LIMIT = 0.2  # part of the attention time that choosing may take before it is said


class Stages:
    """A stopwatch for each stage.

    timed   whether they run; each look waits for the device
    """

    def __init__(self, device: torch.device, timed: bool) -> None:
        self.device, self.timed = device, timed
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add what happens inside to a stage."""
        if not self.timed:
            yield
            return
        start = now(self.device)
        yield
        self.seconds[stage] += now(self.device) - start


def now(device: torch.device) -> float:
    """Seconds, when the device has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def choosing(spent: Mapping[str, float]) -> float:
    """The part of the attention time, codecs left out, that index, top-k and gather take; 0 where nothing was timed."""
    part = sum(spent[stage] for stage in CHOOSING)
    total = part + spent["attention"]
    return part / total if total else 0.0


def told(spent: Mapping[str, float], unit: str = "s", digits: int = 4) -> dict[str, str]:
    """The time of each stage in words."""
    nothing = {"codec": "none", "index": "none", "top_k": "none", "gather": "in place"}
    return {
        stage: f"{round(time, digits):g} {unit}" if time or stage not in nothing else nothing[stage]
        for stage, time in spent.items()
    }


def advice(spent: Mapping[str, float], reselect: int, unit: str = "s", digits: int = 4) -> str | None:
    """What to do if choosing takes too much of the time; None if it does not, or nothing was chosen."""
    share = choosing(spent)
    if share <= LIMIT or not spent["top_k"]:  # without a choice, only pages were learnt
        return None
    stages = ", ".join(f"{stage} {text}" for stage, text in told(spent, unit, digits).items())
    return (
        f"choosing tokens takes {share:.0%} of the attention time ({stages}); it pays below {LIMIT:.0%}: choose less "
        f"often (reselect {max(2 * reselect, 8)}), or a larger top-k"
    )
