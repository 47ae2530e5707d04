"""`kvbackend tune`: climb to a smaller cache as long as the model loses little, and write down what was found."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..profile import Profile, need_place
from ._output import print_json, print_table
from .eval import evaluator, positive

if TYPE_CHECKING:
    from ..evaluate import Settings

_EPILOG = """
Stages, each on what was accepted before: low rank at 3/4, 1/2 and 1/4 of the head dim; sparse attention to 512, 256 and
128 tokens; formats bf16, fp8, int8 and fp4; fp4 or half the dims for half of the layers. A stage ends at the first rung
that loses more than --max-loss. The last rung accepted goes to the profile, which run, eval and plan take by --profile.

exit codes: 0 done, 1 no backend can run the model, 2 wrong usage or something is missing
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder or a .gguf file; default: as for run")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text that is scored; default: Python's own manual")
    parser.add_argument("--max-loss", type=percent, default=0.02, metavar="PERCENT", help="of perplexity; default: 2")
    parser.add_argument("--output", metavar="FILE", default="profile.toml", help="default: profile.toml")
    parser.add_argument("--context", type=positive, metavar="N", help="tokens before the scored ones; default: 1024")
    parser.add_argument("--scored", type=positive, metavar="N", help="tokens of a passage that count; default: 512")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")


def percent(text: str) -> float:
    """A percentage as a share: "2" or "2%" is 0.02. What `tune` would refuse after loading is refused here."""
    share = float(text.removesuffix("%")) / 100
    if not 0 < share < 10:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and below 1000: 2 allows two percent more")
    return share


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    args.calibration = None
    need_place(args.output)
    with evaluator(args, lambda: settings_of(args)) as made:
        from ..tune import tune

        layers = made.model.config.get_text_config(decoder=True).num_hidden_layers
        found = tune(made, layers, args.max_loss)
        chosen, configuration = found.pop("chosen"), made.document([])["configuration_id"]
        target, calibration = Path(args.output), ""
        if chosen["settings"].keys() & {"rank", "ratios"}:
            calibration = target.stem + ".lowrank.safetensors"
            made.calibration.save(target.with_name(calibration))
    keys = "perplexity_change", "cache_bytes", "cache_bytes_fp16", "tokens_per_s"
    measured = {key: chosen[key] for key in keys}
    Profile(chosen["name"], made.name, **measured, configuration_id=configuration, calibration=calibration).write(
        target
    )
    document = {
        "model": made.name,
        "max_loss": args.max_loss,
        **found,
        "chosen": chosen["name"],
        "profile": str(target),
    }
    if args.json:
        print_json("tune", document)
    else:
        print_table(("rung", "stage", "of fp16", "perplexity", "change", "tokens/s", ""), [*map(cells, found["rungs"])])
        print(f"knee: {found['knee']}; chosen: {chosen['name']}, written to {target}")
    return 0


def settings_of(args: argparse.Namespace) -> Settings:
    """How much is measured at each rung."""
    from ..tune import SAMPLE

    given = {"contexts": args.context and (args.context,), "scored": args.scored}
    return replace(SAMPLE, **{name: value for name, value in given.items() if value is not None})


def cells(rung: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "reason" in rung:
        return [rung["name"], rung["stage"], "", "", "", "", rung["reason"]]
    return [
        rung["name"],
        rung["stage"],
        f"{rung['cache_bytes'] / rung['cache_bytes_fp16']:.3f}",
        f"{rung['perplexity']:.3f}",
        f"{100 * rung['perplexity_change']:+.2f}%",
        f"{rung['tokens_per_s']:.0f}",
        "accepted" if rung["accepted"] else "",
    ]
