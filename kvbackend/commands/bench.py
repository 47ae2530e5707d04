"""`kvbackend bench`: what dispatch costs, and how long each op's production sample takes here."""

from __future__ import annotations

import argparse

from ._output import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("ops", metavar="OP", nargs="*", help="ops to time (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    import torch

    from .. import bench
    from ..ops import get, registry

    chosen = [get(name).name for name in args.ops] or sorted(registry)
    found = bench.op_times(chosen)
    if not args.ops:
        found = bench.dispatch_overhead() + found
    machine, limits = bench.machine(), bench.limits()
    if args.json:
        document = dict(machine=machine, threads=torch.get_num_threads(), limits=limits)
        print_json("bench", document | {"results": [result.to_dict() for result in found]})
        return 0
    rows = [
        (
            result.op,
            result.case,
            result.backend,
            f"{result.median_us:.1f}",
            f"{result.p20_us:.1f}",
            "" if result.over_plain_us is None else f"{result.over_plain_us:+.1f}",
        )
        for result in found
    ]
    print_table(("op", "case", "backend", "median us", "p20 us", "over plain us"), rows)
    print(f"{machine}; read {limits['read_gbs']} GB/s, copy {limits['copy_gbs']} GB/s; bfloat16, cache-warm")
    return 0
