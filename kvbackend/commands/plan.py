"""`kvbackend plan MODEL`: what a KV cache costs and what fits. Parse, call, print."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .. import profile
from ..errors import ArgumentError
from ..planner.configs import Source, builtin_names
from ..planner.memory import WEIGHT_BITS, device_names
from ..planner.planning import DEFAULT_CONTEXT, Plan, plan
from ..planner.schemes import SETTINGS

# Options that describe a shape in place of MODEL -> the field of a config.json that each one is.
_SHAPE = {
    "layers": ("num_hidden_layers", "attention layers"),
    "heads": ("num_attention_heads", "query heads"),
    "kv_heads": ("num_key_value_heads", "KV heads (MHA, GQA, MQA)"),
    "head_dim": ("head_dim", "numbers per KV head"),
    "value_head_dim": ("v_head_dim", "numbers per value head, if not those of a key"),
    "window": ("sliding_window", "sliding window in tokens, in every layer"),
    "latent": ("kv_lora_rank", "latent numbers per token (MLA)"),
    "rope": ("qk_rope_head_dim", "rotary numbers per token (MLA)"),
    "index_dim": ("index_head_dim", "numbers per index key (DSA)"),
    "index_topk": ("index_topk", "rows that the indexer selects (DSA)"),
}

_EPILOG = f"""
A SCHEME is a format, then settings: "fp8_e4m3", "int8/int4:64" (K/V), "v4_fp8_584+index_fp8_132" (rows+index keys),
"int4,recent=128,keep=4096", "fp8_e4m3,0-7=fp4_e2m1" (layers 0 to 7). Settings:
{chr(10).join(f"  {name:8} {meaning}" for name, meaning in SETTINGS.items())}

models:  {", ".join(builtin_names())}
devices: {", ".join(device_names())}
exit codes: 0 it fits (or no memory was given), 1 nothing fits, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="config.json, a folder that holds one, or a built-in name"
    )
    shape = parser.add_argument_group("a shape in place of MODEL")
    for name, (_, meaning) in _SHAPE.items():
        shape.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)
    cache = parser.add_argument_group("the cache")
    cache.add_argument("--kv-format", metavar="SCHEME", default="native", help="how it is stored; default: native")
    cache.add_argument(
        "--profile", metavar="FILE", help="the scheme that `kvbackend tune` wrote, in place of --kv-format"
    )
    cache.add_argument("--compare", metavar="SCHEME", nargs="+", default=[], help="more schemes, side by side")
    cache.add_argument(
        "--block-size", type=int, metavar="N", help="tokens of a page; default: the usual of the attention"
    )
    cache.add_argument("--context", type=int, metavar="N", help=f"tokens of a sequence; default: {DEFAULT_CONTEXT}")
    cache.add_argument("--sequences", type=int, metavar="N", default=1, help="sequences at once; default: 1")
    memory = parser.add_argument_group("the memory")
    memory.add_argument("--device", metavar="NAME", help="memory and bandwidth from the table below")
    memory.add_argument("--memory", metavar="SIZE", help="of one device, such as 80GiB")
    memory.add_argument("--bandwidth", metavar="SIZE", help="of one device per second, such as 3350GB")
    memory.add_argument("--host-memory", metavar="SIZE", help="second tier, for sequences that wait")
    memory.add_argument(
        "--margin",
        type=float,
        metavar="PART",
        help="stays free; default: 0.1, 0.2 if shared, on a CPU 8 to 16 GiB",
    )
    memory.add_argument("--activations", metavar="SIZE", help="activations and workspaces; default: a twentieth")
    memory.add_argument("--weights", metavar="SIZE", help="bytes of all weights")
    memory.add_argument("--parameters", metavar="COUNT", help="in place of --weights, such as 8B")
    memory.add_argument("--weights-dtype", metavar="DTYPE", help=f"one of {', '.join(WEIGHT_BITS)}")
    spread = parser.add_argument_group("the devices")
    for name in ("tensor", "pipeline", "expert"):
        spread.add_argument(f"--{name}-parallel", f"--{name[0]}p", type=int, metavar="N", default=1, help="default: 1")
    output = parser.add_argument_group("what is shown")
    output.add_argument("--explain", action="store_true", help="the formulas with the numbers put in")
    output.add_argument("--walk", action="store_true", help="what-if: MHA, GQA, MLA, quantized, sparse, evicted")
    output.add_argument("--plot", metavar="FILE", help="draw bytes against context and per layer (needs matplotlib)")
    output.add_argument("--json", action="store_true", help="one JSON document on stdout")


def main(args: argparse.Namespace) -> int:
    """Run the command: 0 it fits or no memory was given, 1 nothing fits. ArgumentError stands for exit code 2."""
    from ..planner import report
    from ..planner.walk import walk

    source = _source(args)
    if args.profile is not None:
        profile.alone(args.profile, [] if args.kv_format == "native" else ["--kv-format"])
        args.kv_format = profile.read(args.profile).scheme
    schemes = [] if args.compare and args.kv_format == "native" else [args.kv_format]
    plans = [_plan(source, scheme, args) for scheme in [*schemes, *args.compare]]
    steps = walk(plans[0].model) if args.walk else []
    if args.plot is not None:
        from ..planner.picture import plot

        plot(plans, args.plot)
        print(f"plot written to {args.plot}", file=sys.stderr)
    if args.json:
        json.dump(report.document(plans, steps), sys.stdout, indent=2)
        print()
    elif len(plans) > 1:
        report.show_compared(plans, sys.stdout)
    else:
        report.show(plans[0], args.explain, sys.stdout)
    if args.explain and len(plans) > 1 and not args.json:
        for made in plans:
            print(f"  {made.scheme.name}: {made.formula()}")
    if steps and not args.json:
        report.show_walk(steps, plans[0].context, sys.stdout)
    return 1 if all(made.fits is False for made in plans) else 0


def _source(args: argparse.Namespace) -> Source:
    """The model: a name or file, or the fields of a config that the shape options stand for."""
    given = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
    if args.model is not None:
        if given:
            raise ArgumentError(
                f"MODEL is {args.model!r} and --{next(iter(given)).replace('_', '-')} is given; a shape stands in "
                f"place of a model: give one of the two"
            )
        model: str = args.model
        return model
    if not given:
        raise ArgumentError(
            "neither MODEL nor a shape is given; known models are "
            f"{', '.join(builtin_names())}: name one, or give --layers, --kv-heads and --head-dim"
        )
    if "latent" in given and (both := [name for name in ("kv_heads", "head_dim") if name in given]):
        raise ArgumentError(
            f"--latent is given with --{both[0].replace('_', '-')}; a layer caches a latent row or KV heads: give "
            f"one of the two"
        )
    fields: dict[str, Any] = {_SHAPE[name][0]: value for name, value in given.items()}
    if "sliding_window" in fields:
        fields["layer_types"] = ["sliding_attention"] * fields.get("num_hidden_layers", 0)
    return fields | {"model_type": "shape", "dtype": "bfloat16"}


def _plan(source: Source, scheme: str, args: argparse.Namespace) -> Plan:
    return plan(
        source,
        kv_format=scheme,
        memory=args.memory,
        device=args.device,
        bandwidth=args.bandwidth,
        host_memory=args.host_memory,
        weights=args.weights,
        parameters=args.parameters,
        weights_dtype=args.weights_dtype,
        context=args.context,
        sequences=args.sequences,
        block_size=args.block_size,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        expert_parallel=args.expert_parallel,
        margin=args.margin,
        activations=args.activations,
    )
