"""`kvbackend bench`: what dispatch costs, how long each op's production sample takes, how fast codes are moved."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from ..errors import ArgumentError
from ._output import print_json, print_table
from ._sparse import add_case, case_of, numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("ops", metavar="OP", nargs="*", help="ops to time (default: all)")
    parser.add_argument(
        "--crossover",
        action="store_true",
        help="measure from which context on sparse attention is faster than dense here, and keep it for run and "
        "SparseAttention(dense_below='auto')",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="the same cases beside what others' code needs: vLLM's and SGLang's CPU kernels, FlexAttention, "
        "torch.compile (ci/bench_peers.sh makes the environment)",
    )
    parser.add_argument(
        "--curves",
        action="store_true",
        help="how decode attention grows: over context, number of sequences, and threads",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the curves (needs matplotlib)")
    parser.add_argument(
        "--model", metavar="SOC", help="measure nothing: the least times on an Ascend NPU, ascend950pr_9599 for example"
    )
    sparse = add_case(parser, "what --crossover measures")
    sparse.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="of the cache")
    sparse.add_argument(
        "--contexts", default="1024/2048/4096/8192/16384/32768", metavar="N/N...", help="default: 1024 to 32768"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    asked = [name for name in ("model", "crossover", "curves", "peers") if getattr(args, name) not in (None, False)]
    if len(asked) > 1:
        raise ArgumentError(f"--{' and --'.join(asked)} are given; each measures something of its own: give one")
    if args.plot is not None and not args.curves:
        raise ArgumentError(f"--plot is {args.plot!r} without --curves; it draws those: add --curves")
    if args.crossover and args.ops:
        raise ArgumentError(f"--crossover is given with {' '.join(args.ops)}; it measures no single op: leave them out")
    if args.model is not None:
        return roofline(args)
    if args.crossover:
        return crossover(args)
    if args.curves:
        return curves(args)
    import torch

    from ..bench import backends, peers
    from ..bench.limits import limits, machine
    from ..bench.timing import measured
    from ..bench.workloads import cases
    from ..ops import get, registry

    chosen = [get(name).name for name in args.ops] or sorted(registry)
    if args.peers and not {*chosen} <= {"quantize_kv", "dequantize_kv"}:  # beside torch alone
        peers.vllm()  # refused before anything is measured
    found = [*measured(cases(chosen, others=args.peers))]
    if not args.peers:
        found = ([] if args.ops else backends.dispatch_overhead()) + backends.op_times(chosen) + found
    here, at_most = machine(), limits()
    if args.json:
        document = dict(machine=here, torch=torch.__version__, threads=torch.get_num_threads(), limits=at_most)
        print_json("bench", document | {"results": [result.to_dict() for result in found]})
        return 0
    rows = [
        (
            result.op,
            f"{result.case}, {result.dtype}" if result.dtype != "bfloat16" else result.case,
            result.kv_format,
            result.backend,
            f"{result.median_us:.1f}",
            f"{result.p20_us:.1f}",
            "" if result.over_plain_us is None else f"{result.over_plain_us:+.1f}",
            "" if result.gbs is None else f"{result.gbs:.1f}",
            "" if result.gflops is None else f"{result.gflops:.0f}",
            "" if result.of_limit is None else f"{result.of_limit:.0%} of {_plain(result.limit)}",
            ", ".join(f"{peer['ratio']} of {peer['name']}" for peer in result.peers),
        )
        for result in found
    ]
    titles = (
        "op", "case", "format", "backend", "median us", "p20 us", "over plain us", "GB/s", "GFLOP/s", "of limit",
        "time of a peer's",
    )  # fmt: skip
    print_table(titles, rows)
    shown = ", ".join(f"{_plain(name)} {value}" for name, value in at_most.items())
    print(f"{here}; limits in GB/s and GFLOP/s: {shown}")
    return 0


def roofline(args: argparse.Namespace) -> int:
    """Predict and print what an NPU would take at least."""
    from ..bench import roofline as model
    from ..ops import get, registry

    npu = model.find(args.model)
    chosen = [get(name).name for name in args.ops] or sorted(registry)
    found = model.predictions(npu, chosen)
    if args.json:
        document = dict(prediction=True, npu=asdict(npu), assumptions=model.ASSUMPTIONS, left_out=model.LEFT_OUT)
        print_json("bench", document | {"results": [row.to_dict() for row in found]})
        return 0
    rows = [
        (
            row.op,
            row.case,
            f"{row.moved_bytes / 1e6:.1f}",
            f"{row.cube / 1e9:.1f}",
            f"{row.vector / 1e9:.2f}",
            f"{row.predicted_us:.1f}",
            row.bound + (", fits L2" if row.fits_l2 and row.bound == "memory" else ""),
        )
        for row in found
    ]
    titles = ("op", "case", "MB", "GFLOP cube", "GFLOP vector", "us at least", "bound")
    print_table(titles, rows, title=f"PREDICTION for {npu.name}, nothing was measured")
    print(
        f"{npu.memory / 1e12:.2f} TB/s, {npu.cube / 1e12:.0f} TFLOPS of the cube cores (bf16), "
        f"{npu.vector / 1e12:.0f} of the vector cores (float32), {npu.l2_bytes >> 20} MiB of L2; where that was read: "
        f"kvbackend/bench/npus.json"
    )
    for sentence in (*model.ASSUMPTIONS, *(f"{op}: left out, {why}" for op, why in model.LEFT_OUT.items())):
        print(f"- {sentence}")
    return 0


def curves(args: argparse.Namespace) -> int:
    """Measure, draw and print how decode attention grows."""
    from ..bench.curves import OPS, plot
    from ..bench.curves import curves as measured
    from ..bench.limits import machine
    from ..pictures import need_plot

    if wrong := sorted(set(args.ops) - set(OPS)):
        raise ArgumentError(
            f"--curves was asked for {', '.join(wrong)}; it has {' and '.join(OPS)}: name these, or none"
        )
    if args.plot is not None:
        need_plot(args.plot)
    points = list(measured(args.ops or OPS))
    if args.plot:
        plot(points, args.plot, machine())
    if args.json:
        print_json("bench", {"machine": machine(), "curves": [point.to_dict() for point in points]})
        return 0
    rows = [
        (point.op, point.curve, point.at, f"{point.median_us:.1f}", f"{1e3 * point.median_us / point.tokens:.2f}")
        for point in points
    ]
    print_table(("op", "curve", "at", "median us", "ns a token"), rows)
    print(machine())
    return 0


def crossover(args: argparse.Namespace) -> int:
    """Measure dense against sparse decode steps, keep and print it."""
    import torch

    from ..cache import crossover, stages

    contexts = numbers("--contexts", args.contexts)
    case, rows = crossover.measure(*case_of(args), getattr(torch, args.dtype), args.kv_format, contexts)
    crossover.save(case, rows)
    if args.json:
        found: dict[str, Any] = {"case": asdict(case), "rows": [asdict(row) for row in rows]}
        found["tokens"] = crossover.crossover(rows)
        print_json("bench", {"machine": case.device, "crossover": found})
        return 0
    shown = [
        (row.context, f"{row.dense_us:.0f}", f"{row.sparse_us:.0f}", f"{row.sparse_us / row.dense_us:.2f}",
         *stages.told(row.stages_us, "us", digits=0).values())
        for row in rows
    ]  # fmt: skip
    print_table(("context", "dense us", "sparse us", "ratio", *rows[0].stages_us), shown)
    for row in rows:
        if advice := stages.advice(row.stages_us, args.reselect, "us", digits=0):
            print(f"{row.context} tokens: {advice}", file=sys.stderr)
    print(crossover.dense_below(case)[1])
    return 0


def _plain(limit: str | None) -> str:
    return str(limit).rpartition("_")[0].replace("_", " ")
