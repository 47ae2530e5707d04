"""`kvbackend explain OP`: who would run a call of this op here, and why the others would not."""

from __future__ import annotations

import argparse

from ..errors import ArgumentError
from ._output import need_device, print_json

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("op", metavar="OP", help="an op's name, as in `kvbackend ops`")
    parser.add_argument("--sample", help="which of the op's own samples to ask about (default: the first)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the sample (default: bfloat16)")
    parser.add_argument("--device", default="cpu", help="device of the sample's tensors (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(args: argparse.Namespace) -> int:
    """Explain one sample. Exit code 1 where nobody would run it."""
    import torch

    from ..dispatch import explain
    from ..ops import get

    if args.dtype not in DTYPES:
        raise ArgumentError(f"--dtype is {args.dtype!r}; samples come in {', '.join(DTYPES)}: choose one")
    need_device(args.device)
    samples = dict(get(args.op).make_samples(args.device, getattr(torch, args.dtype)))
    name = args.sample or next(iter(samples))
    if name not in samples:
        raise ArgumentError(f"--sample is {name!r}; {args.op} has {', '.join(samples)}: choose one")
    explanation = explain(args.op, **samples[name])
    if args.json:
        print_json("explain", explanation.to_dict() | {"sample": name, "dtype": args.dtype})
    else:
        print(f"{explanation}\n  (sample {name!r}, {args.dtype}; --sample asks about another)")
    return 0 if explanation.chosen else 1
