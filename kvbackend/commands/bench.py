"""`kvbackend bench`: what dispatch costs, how long each op's production sample takes, how fast codes are moved."""

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

    from .. import bench, bench_formats, bench_sparse
    from ..ops import get, registry

    chosen = [get(name).name for name in args.ops] or sorted(registry)
    found = bench.op_times(chosen)
    if not args.ops:
        found = bench.dispatch_overhead() + found
    found += bench_formats.format_times(chosen) + bench_sparse.sparse_times(chosen)
    machine, limits = bench.machine(), bench.limits()
    if args.json:
        document = dict(machine=machine, threads=torch.get_num_threads(), limits=limits)
        print_json("bench", document | {"results": [result.to_dict() for result in found]})
        return 0
    rows = [
        (
            result.op,
            result.case,
            result.kv_format,
            result.backend,
            f"{result.median_us:.1f}",
            f"{result.p20_us:.1f}",
            "" if result.over_plain_us is None else f"{result.over_plain_us:+.1f}",
            "" if result.gbs is None else f"{result.gbs:.1f}",
            "" if result.of_limit is None else f"{result.of_limit:.0%}",
            ", ".join(f"{peer['ratio']} of {peer['name']}" for peer in result.peers),
        )
        for result in found
    ]
    titles = (
        "op",
        "case",
        "format",
        "backend",
        "median us",
        "p20 us",
        "over plain us",
        "GB/s",
        "of copy",
        "time of a peer's",
    )
    print_table(titles, rows)
    print(
        f"{machine}; read {limits['read_gbs']} GB/s, copy {limits['copy_gbs']} GB/s; bfloat16, cache-warm but for "
        f"rows with GB/s"
    )
    return 0
