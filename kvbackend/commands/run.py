"""`kvbackend run [PROMPT]`: a real language model decodes through kvbackend's paged cache.

torch and transformers are imported when the command runs, not when its options are read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import model_store, profile
from ..errors import ArgumentError
from ..planner.planning import need_fitting
from ..planner.schemes import POLICIES, parse
from ._output import print_json, print_table

if TYPE_CHECKING:
    import torch

    from ..integrations.transformers import PagedCache

DEFAULT_PROMPT = "The capital of France is"
SCHEME_OPTIONS = ("kv_format", "keep_recent", "keep_sinks", "evict", "low_rank", "sparse_topk", "sparse_reselect")
MAX_BLOCK_SIZE = 1 << 16  # tokens; far past every kernel's pages, and still little memory
DTYPES = ("float32", "bfloat16", "float16")
_EPILOG = f"""
The default model is {model_store.DEFAULT_NAME}, from the package {model_store.PACKAGE}; it is converted once and
kept in $XDG_CACHE_HOME/kvbackend (else ~/.cache/kvbackend). Decoding is greedy. In float32 the tokens are those
that transformers finds with its own cache; --verify runs that too and compares.

exit codes: 0 done, 1 --verify found other tokens or no backend can run the model, 2 wrong usage or something is missing
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "prompt", nargs="?", default=DEFAULT_PROMPT, metavar="PROMPT", help=f"default: {DEFAULT_PROMPT!r}"
    )
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder or a .gguf file; default: see below")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="default: 64")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="the model continues the prompt as it stands (the default)")
    form.add_argument(
        "--chat", action="store_true", help="the prompt is a question, put into the model's chat template"
    )
    cache = parser.add_argument_group("the cache", "tokens are evicted, then projected, then stored in the format")
    cache.add_argument(
        "--kv-format",
        metavar="SCHEME",
        help="how tokens are stored, as for `kvbackend plan`: fp8_e4m3, int8/int4 (K/V), 'fp8_e4m3,0-7=fp4_e2m1' "
        "(layers 0 to 7); default: auto, as --dtype says",
    )
    cache.add_argument("--keep-recent", type=count, metavar="W", help="last tokens that stay in full precision too")
    cache.add_argument("--keep-sinks", type=count, metavar="S", help="first tokens, likewise")
    cache.add_argument(
        "--evict",
        metavar="POLICY:KEEP[:NAME=VALUE...]",
        help=f"tokens (512) or share of the prompt (25%%) that stay; POLICY is {', '.join(POLICIES)}; NAME is an "
        "argument of the policy (sinks, recent, observed ...), or summary: rows that stand for evicted tokens",
    )
    cache.add_argument(
        "--low-rank",
        metavar="RATIOS",
        help="dims of a head divided by these, first layer to last: 2, or 1/1/2/2/4/4; fitted to a built-in text. Or "
        "the file of a kvbackend.compress.Calibration",
    )
    cache.add_argument(
        "--sparse-topk",
        metavar="K[/K...]",
        help="decode steps attend to the best K tokens, the first 4 and the last 64; a list is for the layers in order",
    )
    cache.add_argument("--sparse-reselect", type=count, metavar="N", help="choose every N steps; 0: once. Default: 1")
    cache.add_argument(
        "--sparse-from",
        type=count,
        metavar="TOKENS",
        help="shorter contexts are attended to in full; default: what `kvbackend bench --crossover` measured here",
    )
    cache.add_argument("--profile", metavar="FILE", help="all of this from what `kvbackend tune` wrote")
    cache.add_argument(
        "--block-size", type=positive, metavar="N", help="tokens of a page; default: 16, or what the format needs"
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument("--device", default="auto", help="auto, cpu, cuda, npu; default: the best that a backend serves")
    where.add_argument("--dtype", choices=DTYPES, help="of the model; default: float32 on cpu, else bfloat16")
    where.add_argument("--backend", metavar="NAME", help="this backend for every op; it never falls back")
    output = parser.add_argument_group("what is shown")
    output.add_argument("--verify", action="store_true", help="run transformers' own cache too and compare the tokens")
    output.add_argument("--json", action="store_true", help="one JSON document instead of text")


def positive(text: str) -> int:
    """A number of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def count(text: str) -> int:
    """A number of 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return number


def scheme_of(args: argparse.Namespace) -> str:
    """The scheme that the options for the cache make together."""
    parts = ["auto" if args.kv_format is None else args.kv_format]
    parts += [f"{name}={value}" for name, value in (("recent", args.keep_recent), ("sinks", args.keep_sinks)) if value]
    parts += [f"evict={args.evict}"] if args.evict is not None else []
    if args.low_rank is not None and not os.path.exists(args.low_rank):
        parts.append(f"ratios={args.low_rank}")
    parts += [f"topk={args.sparse_topk}"] if args.sparse_topk is not None else []
    parts += [f"reselect={args.sparse_reselect}"] if args.sparse_reselect is not None else []
    return ",".join(parts)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if not args.prompt.strip():
        raise ArgumentError("prompt is empty; the model needs at least one word: write one")
    given = profile.read(args.profile) if args.profile is not None else None
    named = {f"--{name.replace('_', '-')}": getattr(args, name) for name in SCHEME_OPTIONS}
    profile.alone(args.profile, [name for name, value in named.items() if value is not None])
    if args.sparse_reselect is not None and "topk=" not in scheme_of(args):  # --kv-format may hold it
        raise ArgumentError("--sparse-reselect is given without --sparse-topk; it says how often to choose: add it")
    scheme = parse(given.scheme if given else scheme_of(args))
    if args.sparse_from is not None and not scheme.topk:
        raise ArgumentError("--sparse-from is given without --sparse-topk; it says where choosing begins: add it")
    if args.block_size and args.block_size > MAX_BLOCK_SIZE:
        raise ArgumentError(
            f"--block-size is {args.block_size}; a page holds 1 to {MAX_BLOCK_SIZE} tokens: pass 16, 64 or 256"
        )
    model_store.need_packages("transformers", "safetensors")
    with ExitStack() as chosen:
        with steps(3) as step:
            step("importing torch and transformers", count=False)
            quieten_transformers()
            from .. import use
            from ..integrations.transformers import PagedCache, new_cache, patch
            from ..integrations.transformers.schemes import calibrated, largest_numbers, need_dense, options_of

            if args.backend is not None:
                chosen.enter_context(use(args.backend))
            device = choose_device(args.device)
            name, folder = model_store.locate(args.model, lambda text: step(text, more=True))
            if given:
                given.need_model(name)
            need_fitting(folder, [scheme.name], args.block_size)
            step(f"loading {name}")
            dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
            tokenizer, model = load(folder, dtype, device)
            need_dense(model, name)
            inputs = encode(tokenizer, model, args.prompt, args.chat, args.max_new_tokens).to(device)

            def calibration(path: str | None = None) -> Any:
                step("fitting the low-rank projections", more=True)
                return calibrated(model, tokenizer, path or (given and given.calibration) or None)

            largest = lambda: largest_numbers(model, tokenizer)  # noqa: E731
            cached = options_of(scheme, model, calibration, largest, args.block_size)
            if args.low_rank and os.path.exists(args.low_rank):
                cached["low_rank"] = calibration(args.low_rank)
            cached["timed"] = True
            if "sparse" in cached:
                cached |= dict(dense_below="auto" if args.sparse_from is None else args.sparse_from)
            patch(model, **cached)
            options: dict[str, Any] = dict(inputs, do_sample=False, pad_token_id=tokenizer.pad_token_id)
            step("warming up")
            model.generate(**options, max_new_tokens=2)
            step("decoding")
        prompt_tokens = inputs["input_ids"].shape[1]
        cache = new_cache(model, num_blocks=-(-(prompt_tokens + args.max_new_tokens) // cached["block_size"]))
        assert isinstance(cache, PagedCache)
        clock = Clock(lambda: stage_seconds(cache))
        streamer = make_streamer(tokenizer, clock, show=not args.json)
        if not args.json and not args.chat:
            print(args.prompt, end="", flush=True)
        sequence = model.generate(**options, max_new_tokens=args.max_new_tokens, cache=cache, streamer=streamer)[0]
    token_ids = sequence[prompt_tokens:].tolist()
    document = {
        "model": name,
        "device": str(device),
        "dtype": dtype,
        "prompt": args.prompt,
        "prompt_form": "chat" if args.chat else "raw",
        "prompt_token_ids": inputs["input_ids"][0].tolist(),
        "text": tokenizer.decode(token_ids, skip_special_tokens=True),
        "token_ids": token_ids,
        **clock.rates(prompt_tokens),
        "stage_seconds": (spent := clock.stages()),
        **cache_figures(cache),
        **sparse_figures(cache, model, spent["decode"]),
        "kv_format": args.kv_format or scheme.key.replace("native", "auto"),
        "scheme": scheme.name,
        "backends": cache.backends,
    }
    if args.verify:
        expected = transformers_tokens(model, options, args.max_new_tokens)
        document |= {"transformers_token_ids": expected, "identical_to_transformers": expected == token_ids}
    if args.json:
        print_json("run", document)
    else:
        print()
        print_table((name, f"{dtype} on {device}"), list(table(document)))
        if args.verify:
            print(verdict(document))
        if advice := document.get("sparse_advice"):
            print(advice, file=sys.stderr)
    return 0 if document.get("identical_to_transformers", True) else 1


def quieten_transformers() -> None:
    """Keep its advice and its own progress bars off stderr."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # one of its bars asks nothing else; read when tqdm is imported
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------------- loading


@contextmanager
def steps(total: int) -> Iterator[Any]:
    """Show the steps of loading: a bar on a terminal, else one line each; always on stderr."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        console = None
    else:
        console = Console(stderr=True)
    if console is None or not console.is_terminal:
        yield lambda text, **_: print(f"kvbackend run: {text}", file=sys.stderr, flush=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def step(text: str, count: bool = True, more: bool = False) -> None:
            """Begin a step. count: one before it is done; more: it comes on top of the total."""
            if more:
                progress.update(task, total=(progress.tasks[0].total or 0) + 1)
            progress.update(task, description=text, advance=int(count))

        yield step


def choose_device(name: str) -> torch.device:
    """The device asked for; "auto": the accelerator here if a backend of kvbackend serves it, else the CPU."""
    import torch

    from .. import backends

    found = torch.accelerator.current_accelerator(check_available=True) if torch.accelerator.is_available() else None
    if name == "auto":
        served = {backend.device for backend in backends.registered().values() if not backend.missing()}
        return found if found is not None and found.type in served else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError(f"device is {name!r}; torch knows no such type: pass auto, cpu, cuda or npu") from None
    if device.type != "cpu" and (found is None or found.type != device.type):
        here = f"cpu and {found.type}" if found else "cpu only"
        raise ArgumentError(f"device is {name!r}; torch sees {here} on this machine: pass one of these, or auto")
    return device


def load(folder: Path, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """Tokenizer and model of a Hugging Face folder."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, SafetensorError) as error:  # absent, unknown or damaged files
        raise ArgumentError(
            f"model {folder} cannot be loaded ({str(error).strip().splitlines()[0]}); it must hold a causal language "
            f"model and its tokenizer: check the folder"
        ) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, model.to(device).eval()


def encode(tokenizer: Any, model: Any, prompt: str, chat: bool, max_new_tokens: int) -> Any:
    """The prompt as the model reads it: as it stands, or as a question in the chat template."""
    if chat:
        if not tokenizer.chat_template:
            raise ArgumentError("--chat is given but the model has no chat template; it continues text: drop --chat")
        turns = [{"role": "user", "content": prompt}]
        template = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt")
        inputs = tokenizer.apply_chat_template(turns, **template)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    context = getattr(model.config, "max_position_embeddings", None)
    wanted = inputs["input_ids"].shape[1] + max_new_tokens
    if context and wanted > context:
        raise ArgumentError(
            f"the prompt and --max-new-tokens come to {wanted} tokens; the model's context is {context}: shorten one "
            f"of them"
        )
    return inputs


# ------------------------------------------------------------------------------------------------------ decoding


@dataclass
class Clock:
    """When the prompt went in and each token came out.

    look   seconds of each stage of attention so far
    """

    look: Callable[[], dict[str, float]]
    prefill: dict[str, float] = field(default_factory=dict)
    start: float = 0.0
    times: list[float] = field(default_factory=list)

    def tick(self) -> None:
        """The prompt first, then a token each."""
        now = time.perf_counter()
        if self.start:
            self.times.append(now)
            self.prefill = self.prefill or self.look()
        else:
            self.start = now

    def stages(self) -> dict[str, dict[str, float]]:
        """Seconds of each stage of attention, of the prompt and of decoding after it."""
        decode = {stage: seconds - self.prefill[stage] for stage, seconds in self.look().items()}
        return {
            name: {stage: round(seconds, 4) for stage, seconds in spent.items()}
            for name, spent in (("prefill", self.prefill), ("decode", decode))
        }

    def rates(self, prompt_tokens: int) -> dict[str, float | None]:
        """Tokens per second; decoding has a rate from the second new token on."""
        prefill = self.times[0] - self.start
        decode = self.times[-1] - self.times[0]
        return {
            "prefill_tokens_per_s": round(prompt_tokens / prefill, 2),
            "decode_tokens_per_s": round((len(self.times) - 1) / decode, 2) if len(self.times) > 1 else None,
        }


def make_streamer(tokenizer: Any, clock: Clock, show: bool) -> Any:
    """A streamer for `generate` that lets a clock tick and, if asked, prints words as they become complete."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def put(self, value: Any) -> None:
            clock.tick()
            if show:
                super().put(value)

        def end(self) -> None:
            if show:
                super().end()

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def cache_figures(cache: PagedCache) -> dict[str, Any]:
    """What the cache takes, and what it would take in fp16 at the same number of pages."""
    store = cache.store
    assert store is not None
    pages, layers = store.pages, len(cache.layers)
    return {
        "cache_tokens": cache.tokens,
        "cache_rows": round(sum(store.held(layer) for layer in range(layers)) / layers, 2),
        "cache_bytes": cache.cache_bytes,
        "cache_bytes_fp16": cache.cache_bytes_fp16,
        "projection_bytes": store.projection_bytes,
        "bytes_per_token": store.bytes_per_row,
        "bytes_per_token_fp16": cache.bytes_per_token_fp16,
        "block_size": pages.block_size,
        "pages_used": pages.blocks_used,
        "pages_total": pages.blocks_total,
    }


def stage_seconds(cache: PagedCache) -> dict[str, float]:
    """Seconds of each stage of attention so far."""
    assert cache.store is not None
    return dict(cache.store.stages.seconds)


def sparse_figures(cache: PagedCache, model: Any, spent: dict[str, float]) -> dict[str, Any]:
    """What sparse attention does, and what to do where choosing takes too much of a decode step; nothing without it."""
    from ..cache import stages

    store = cache.store
    if store is None or store.sparse is None:
        return {}
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    return {
        "sparse": store.sparse.explain(0, heads, cache.tokens),
        "sparse_advice": stages.advice(spent, store.sparse.sparsity.reselect),
    }


def transformers_tokens(model: Any, options: dict[str, Any], max_new_tokens: int) -> list[int]:
    """The new tokens that transformers' own attention and cache find. The model stays unpatched."""
    from ..integrations.transformers import unpatch

    unpatch(model).set_attn_implementation("eager")
    sequence = model.generate(**options, max_new_tokens=max_new_tokens)[0]
    tokens: list[int] = sequence[options["input_ids"].shape[1] :].tolist()
    return tokens


# ------------------------------------------------------------------------------------------------------- showing


def table(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The closing table, row by row."""
    from ..cache.stages import told

    per_token, fp16 = document["bytes_per_token"], document["bytes_per_token_fp16"]
    decode = document["decode_tokens_per_s"]
    yield "prefill", f"{document['prefill_tokens_per_s']:,} tokens/s ({len(document['prompt_token_ids'])} tokens)"
    yield "decode", f"{decode:,} tokens/s ({len(document['token_ids'])} tokens)" if decode else "-"
    yield "cache per token", f"{per_token:,} bytes ({per_token / fp16:.2f} of fp16's {fp16:,})"
    total, total_fp16 = document["cache_bytes"], document["cache_bytes_fp16"]
    if document["cache_rows"] != document["cache_tokens"]:
        yield "rows kept", f"{document['cache_rows']:g} of {document['cache_tokens']} tokens, a layer's mean"
    if document["projection_bytes"]:
        yield "projections", f"{document['projection_bytes']:,} bytes, with the weights"
    yield "cache in all", f"{total:,} bytes ({total / total_fp16:.2f} of fp16's {total_fp16:,})"
    used, size = document["pages_used"], document["block_size"]
    yield "pages used", f"{used} of {document['pages_total']}, {size} tokens each"
    if "sparse" in document:
        yield "sparse", document["sparse"]
    for part, spent in document["stage_seconds"].items():
        yield f"{part} stages", ", ".join(f"{stage} {text}" for stage, text in told(spent).items())
    for op, backend in document["backends"].items():
        yield op, str(backend)


def verdict(document: dict[str, Any]) -> str:
    """What --verify found, in a sentence."""
    ours, expected = document["token_ids"], document["transformers_token_ids"]
    if ours == expected:
        return f"verified: all {len(ours)} tokens are those of transformers' own cache"
    differing = next((i for i, pair in enumerate(zip(ours, expected, strict=False)) if pair[0] != pair[1]), None)
    where = f"from token {min(len(ours), len(expected)) if differing is None else differing} on"
    return f"NOT verified: the tokens differ from those of transformers' own cache {where}"
