"""The case that sparse attention is measured for, as options of commands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..cache import GqaLayer, Sparsity


def add_case(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Declare the options, dtype excepted."""
    group = parser.add_argument_group(title)
    group.add_argument(
        "--shape", default="32/8/128", metavar="HEADS/KV_HEADS/HEAD_DIM", help="of a layer; default: 32/8/128"
    )
    group.add_argument("--kv-format", default="auto", metavar="F", help="of the cache; default: auto, as --dtype says")
    group.add_argument("--topk", type=int, default=256, metavar="K", help="default: 256")
    group.add_argument("--reselect", type=int, default=1, metavar="N", help="steps that one choice serves; default: 1")
    return group


def case_of(args: argparse.Namespace) -> tuple[GqaLayer, int, Sparsity]:
    """The layer, its query heads, and what is chosen."""
    from ..cache import GqaLayer, Sparsity

    heads, kv_heads, head_dim = numbers("--shape", args.shape, 3)
    return GqaLayer(kv_heads, head_dim), heads, Sparsity(args.topk, reselect=args.reselect)


def numbers(name: str, text: str, wanted: int | None = None) -> list[int]:
    """Numbers of 1 or more with slashes between."""
    parts = text.split("/")
    if not all(part.isdigit() and int(part) for part in parts) or wanted not in (None, len(parts)):
        count = f"{wanted} numbers" if wanted else "numbers"
        raise ArgumentError(f"{name} is {text!r}; it must be {count} of 1 or more with slashes between: write 32/8/128")
    return [int(part) for part in parts]
