"""`kvbackend explain OP`: who would run a call of this op here, and why the others would not.

Of `sparse_attention`, also below which context automatic mode stays dense, and how that is known; not in float64, which
no cache holds.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ArgumentError
from ._output import need_device, print_json
from ._sparse import add_case, case_of

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("op", metavar="OP", help="an op's name, as in `kvbackend ops`")
    parser.add_argument("--sample", help="which of the op's own samples to ask about (default: the first)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the sample (default: bfloat16)")
    parser.add_argument("--device", default="cpu", help="device of the sample's tensors (default: cpu)")
    add_case(parser, "of sparse_attention: the case that automatic mode is asked about")
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
    found = automatic(args) if args.op == "sparse_attention" and args.dtype != "float64" else None
    if args.json:
        more = {} if found is None else {"automatic": found}
        print_json("explain", explanation.to_dict() | {"sample": name, "dtype": args.dtype, **more})
    else:
        print(f"{explanation}\n  (sample {name!r}, {args.dtype}; --sample asks about another)")
        if found is not None:
            print(f"automatic mode (dense_below='auto'): {found['mode']}; {found['why']}")
    return 0 if explanation.chosen else 1


def automatic(args: argparse.Namespace) -> dict[str, Any]:
    """Below which context SparseAttention(dense_below="auto") attends to all tokens, and how that is known."""
    from dataclasses import asdict

    import torch

    from ..cache import PagedCache, crossover

    layer, heads, sparsity = case_of(args)
    cache = PagedCache([layer], 1, 16, getattr(torch, args.dtype), args.device, kv_format=args.kv_format)
    case = crossover.Case.of(cache, 0, heads, sparsity)
    below, why = crossover.dense_below(case)
    mode = f"dense below {below} tokens, sparse from there on"
    return {"dense_below": below, "mode": mode, "why": why, "case": asdict(case)}
