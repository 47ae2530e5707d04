"""How the limits of vendor ops are written down, and the refusals that are derived from them.

A limit is a fact with a source: what an op's documentation allows for one named property on some products. Predicates
name the property and the value they found; the sentence is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...arrays import one_of
from ...compat import versions
from ..limits import Rule
from . import cann_ops, target
from .target import FAMILIES


@dataclass(frozen=True)
class Limit:
    """What one property of a call may be, on some products."""

    name: str
    rule: Rule
    families: tuple[str, ...] = FAMILIES
    source: str = ""  # where it differs from the op's


@dataclass(frozen=True)
class VendorOp:
    """One op of torch_npu, or of CANN's own package, as we call it.

    name     as its documentation has it; with a dot, the package and the op in it
    aclnn    what it runs, as the golden call logs of torch_npu 2.13.0 show, or the wrappers of CANN's package
    cann     the lowest CANN that documents the op, by product; a product that is not there has no such op
    train    the first build train with the signature that we call, and why not an earlier one
    source   where the limits are documented
    """

    name: str
    aclnn: tuple[str, ...]
    cann: dict[str, str]
    limits: tuple[Limit, ...]
    source: str
    train: str = "2026-01"
    train_why: str = ""
    note: str = ""

    @property
    def of_cann(self) -> bool:
        """Whether it is CANN's own torch op, and not torch_npu's."""
        return self.name.startswith(f"{cann_ops.PACKAGE}.")

    def is_here(self) -> bool:
        """Whether the current product has the op, and so limits of its own."""
        return target.current().family in self.cann

    def missing(self) -> Iterator[str]:
        """Why this product, torch_npu or CANN does not have the op."""
        here = target.current()
        if not self.is_here():
            yield (
                f"the NPU is an Ascend{here.family}; {self.name} runs on {one_of(self.cann)} ({self.source}): "
                f"use the reference there"
            )
            return
        if here.train < self.train:
            yield (
                f"torch_npu was built in {here.train}; {self.name} is called as of {self.train} ({self.train_why}): "
                f"install a newer post release"
            )
        lowest = self.cann[here.family]
        if lowest and versions.within(here.cann, f">={lowest}") is False:
            yield (
                f"CANN is {here.cann}; {self.name} on Ascend{here.family} needs {lowest} or newer ({self.source}): "
                f"upgrade CANN"
            )
        elif self.of_cann:
            yield from cann_ops.missing(self.name.partition(".")[2], self.aclnn)

    def refuse(self, name: str, value: Any, got: str, todo: str) -> Iterator[str]:
        """The reason against a property's value, if there is one; `got` says in words what the value is of."""
        limit = self.limit(name)
        if not limit.rule.allows(value):
            yield (
                f"{got} {value}; {self.name} takes {limit.rule} on Ascend{target.current().family} "
                f"({limit.source or self.source}): {todo}"
            )

    def limit(self, name: str) -> Limit:
        """The limit of a property on the current product."""
        family = target.current().family
        return next(limit for limit in self.limits if limit.name == name and family in limit.families)
