"""`kvbackend eval [SCHEME...]`: what compressing the cache costs a real language model on real text."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import model_store, profile, texts
from ..errors import ArgumentError
from ..planner.planning import need_fitting
from ..planner.schemes import SETTINGS, parse
from ._output import bar, print_json, print_table

if TYPE_CHECKING:
    from ..evaluate import Settings

_EPILOG = f"""
A SCHEME is what `kvbackend run --kv-format` takes: a format, then settings, such as "fp8_e4m3", "int8/fp4_e2m1" (K/V),
"fp4_e2m1,recent=128", "bf16,rank=32", "fp8_e4m3,evict=snapkv:25%". Settings:
{chr(10).join(f"  {name:8} {meaning}" for name, meaning in SETTINGS.items())}

Tokens are scored chunk by chunk against what the cache gives back of all tokens before. The text is Python's own
manual unless --text names a file; its first {texts.CALIBRATION_TOKENS} tokens fit low-rank projections, and are never
scored.

exit codes: 0 done, 1 no backend can run the model, 2 wrong usage or something is missing
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("schemes", metavar="SCHEME", nargs="*", help="default: a list of all kinds")
    parser.add_argument("--sweep", choices=["granularity"], help="fp8 and fp4 with scales from per tensor to per 16")
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder or a .gguf file; default: as for run")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text that is scored; default: Python's own manual")
    parser.add_argument("--quick", action="store_true", help="one context of 1024 tokens and a short list of schemes")
    parser.add_argument(
        "--contexts", metavar="N,N...", type=counts, help="tokens before the scored ones; default: 1024 to 7040"
    )
    parser.add_argument("--rows", type=positive, metavar="N", help="passages for each context; default: 2")
    parser.add_argument("--scored", type=positive, metavar="N", help="tokens of a passage that count; default: 1024")
    parser.add_argument("--chunk", type=positive, metavar="N", help="tokens of a forward; default: 128")
    parser.add_argument(
        "--profile", metavar="FILE", help="the scheme of a profile of `kvbackend tune`, with the others"
    )
    parser.add_argument("--calibration", metavar="FILE", help="saved projections, for schemes with a rank")
    parser.add_argument("--compare", metavar="FILE", nargs="+", help="show saved --json documents side by side instead")
    parser.add_argument("--plot", metavar="FILE", help="draw bytes against perplexity (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")


def positive(text: str) -> int:
    """A number of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def counts(text: str) -> tuple[int, ...]:
    """Numbers of 1 or more."""
    return tuple(positive(part) for part in text.split(","))


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.compare:
        return compare(args)
    found = profile.read(args.profile) if args.profile is not None else None
    if found:
        args.schemes.append(found.scheme)
        args.calibration = (found.calibration or None) if args.calibration is None else args.calibration
    parsed = [parse(scheme) for scheme in args.schemes]  # a misspelled one is told before the model loads
    if args.calibration is not None and parsed and not any(scheme.rank or scheme.ratios for scheme in parsed):
        raise ArgumentError(
            f"--calibration is {args.calibration!r}, but no SCHEME has a rank; it holds projections: leave it out, or "
            f"add rank or ratios"
        )

    def check(name: str, folder: Path) -> None:
        if found:
            found.need_model(name)
        need_fitting(folder, args.schemes)

    if args.plot is not None:
        from ..evaluate.plot import plot
        from ..pictures import need_plot

        need_plot(args.plot)
    with evaluator(args, lambda: settings_of(args), args.schemes, check) as made:
        schemes = list(args.schemes)
        if args.sweep:
            from ..evaluate import granularity_sweep

            schemes += granularity_sweep(made.head_dim)
        if not schemes:
            from ..evaluate import default_schemes

            schemes = default_schemes(made.head_dim, args.quick)
        document = made.document(schemes, strict=bool(args.schemes))
    if args.plot:
        plot(document, args.plot)
        print(f"plot written to {args.plot}", file=sys.stderr)
    if args.json:
        print_json("eval", document)
    else:
        show(document)
    return 0


def settings_of(args: argparse.Namespace) -> Settings:
    """How much the options ask to measure."""
    from ..evaluate import QUICK, Settings

    given = {name: getattr(args, name) for name in ("contexts", "rows", "scored", "chunk") if getattr(args, name)}
    return replace(QUICK if args.quick else Settings(), **given)


@contextmanager
def evaluator(
    args: argparse.Namespace,
    settings: Callable[[], Settings],
    schemes: Sequence[str] = (),
    check: Callable[[str, Path], None] = lambda name, folder: None,
) -> Iterator[Any]:
    """The model loaded, the sample made, the baseline measured; a bar on a terminal.

    settings   called when torch is there
    schemes    refused before anything is measured, where the model cannot have them
    check      told the model's name and folder before it loads
    """
    text_name, text = texts.read(args.text)
    model_store.need_packages("transformers", "safetensors")
    from .run import choose_device, load, quieten_transformers

    quieten_transformers()
    from ..dispatch import FallbackWarning
    from ..evaluate import Evaluator

    warnings.simplefilter("ignore", FallbackWarning)  # the document names the backend of every op
    with bar() as step:
        step("loading the model", 0, 1)
        name, folder = model_store.locate(args.model, lambda told: step(told, 0, 1))
        check(name, folder)
        device = choose_device("auto")
        tokenizer, model = load(folder, "float32" if device.type == "cpu" else "bfloat16", device)
        about = name, text, text_name, settings(), args.calibration
        with Evaluator(model, tokenizer, *about, step, schemes) as made:
            yield made


# ------------------------------------------------------------------------------------------------------- showing

COLUMNS = (
    "scheme", "of fp16", "perplexity", "change", "KL", "top-1", "needle", "exact", "code", "same", "repeats",
    "tokens/s",
)  # fmt: skip


def show(document: dict[str, Any]) -> None:
    """The table, and what stands behind it."""
    base = document["baseline"]
    rows = [cells(base, "full precision"), *(cells(entry, mark(entry)) for entry in document["schemes"])]
    print_table(COLUMNS, rows, title=f"{document['model']}, {document['text_tokens']} tokens scored")
    configuration = document["configuration"]
    print(
        f"* no other scheme is better in bytes and perplexity both. ±: 95 percent interval of the change, over runs of "
        f"tokens. Text {configuration['text']}, contexts "
        f"{', '.join(map(str, configuration['contexts']))}, chunks of {configuration['chunk']}; configuration "
        f"{document['configuration_id']}"
    )
    for entry in document["left_out"]:
        print(f"left out: {entry['name']}: {entry['reason']}")


def mark(entry: dict[str, Any]) -> str:
    """The name of a scheme, with a star on the Pareto front."""
    return f"{entry['name']} *" if entry["pareto"] else str(entry["name"])


def cells(entry: dict[str, Any], name: str) -> list[str]:
    """A row of the table."""
    code = entry["code"]
    return [
        name,
        f"{entry['cache_bytes'] / entry['cache_bytes_fp16']:.3f}",
        f"{entry['perplexity']:.3f}",
        f"{100 * entry['perplexity_change']:+.2f}%{_margin(entry)}" if "perplexity_change" in entry else "",
        f"{entry['kl']:.4f}" if "kl" in entry else "",
        f"{100 * entry['top1_agreement']:.1f}%" if "top1_agreement" in entry else "",
        *("" if entry[key] is None else f"{100 * entry[key]:.0f}%" for key in ("needle", "exact_recall")),
        f"{100 * code['accuracy']:.1f}%",
        str(code.get("same_continuation", "")),
        f"{100 * entry['repetition']:.0f}%",
        f"{entry['tokens_per_s']:.0f}",
    ]


def _margin(entry: dict[str, Any]) -> str:
    """What follows a change; nothing in documents from before it was measured."""
    return f" ±{100 * entry['perplexity_change_margin']:.2f}" if "perplexity_change_margin" in entry else ""


def compare(args: argparse.Namespace) -> int:
    """Show saved documents side by side; exit code 2 where they may not be compared."""
    from ..evaluate import compare as saved

    if len(args.compare) < 2:
        raise ArgumentError("--compare names one file; it takes two or more: pass the documents of eval --json")
    documents = [saved.read(path) for path in args.compare]
    saved.need_same_configuration(args.compare, documents)
    if args.json:
        print_json("eval", {"compared": [dict(file=p, **d) for p, d in zip(args.compare, documents, strict=True)]})
        return 0
    rows: list[Sequence[str]] = [cells(documents[0]["baseline"], "full precision")]
    for path, document in zip(args.compare, documents, strict=True):
        rows += [cells(entry, f"{entry['name']} ({path})") for entry in document["schemes"]]
    print_table(COLUMNS, rows, title=f"{documents[0]['model']}, configuration {documents[0]['configuration_id']}")
    return 0
