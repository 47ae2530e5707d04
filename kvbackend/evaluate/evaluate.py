"""Scheme after scheme over the same sample, compared with full precision under one recorded configuration."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import texts
from ..codecs.split import STATIC
from ..errors import ArgumentError
from ..integrations.transformers import new_cache, patch, unpatch
from ..integrations.transformers.patching import cache_argument
from ..integrations.transformers.schemes import calibrated, largest_numbers, need_dense, need_possible, options_of
from ..planner.schemes import parse
from . import measure
from .sample import Settings, digest, passages

BASELINE = "auto"  # keys and values as the model makes them
# Formats by the granularity of their scales, from one per tensor to one per 16 numbers.
SWEEP = {
    "fp8_e4m3": ("tensor", "head", "channel", "token_head", "128", "64", "32", "16"),
    "fp4_e2m1": ("tensor", "channel", "128", "64", "32", "16"),
}

Step = Callable[[str, int, int], None]  # told the scheme, the tokens done and their number


def default_schemes(head_dim: int | None, quick: bool = False) -> list[str]:
    """Formats, kept tokens, low rank, eviction and stacks of them. head_dim: None where a model has no heads (MLA)."""
    formats = ["fp8_e4m3", "fp8_e4m3:token_head", "int8", "int4", "fp4_e2m1", "fp4_e2m1,recent=128,sinks=4"]
    evict = ["bf16,evict=snapkv:25%"]
    low_rank = [f"bf16,rank={head_dim // 2}/{head_dim}"] if head_dim else []
    stacks = []
    if not quick:
        stacks += ["fp8_e4m3,evict=snapkv:50%", "fp4_e2m1,evict=snapkv:50%"]
        formats += ["mxfp4", "nvfp4,scales=amax" if head_dim else "nvfp4", "fp8_e5m2", "mxfp8"]
        formats += ["int8/fp8_e4m3", "int8/fp4_e2m1", "fp4_e2m1/int8", "int4,recent=128"]
        evict += ["bf16,evict=h2o:25%", "bf16,evict=streaming:25%", "bf16,evict=snapkv:25%:summary=16"]
        evict += ["bf16,evict=tova:25%", "bf16,evict=l2norm:50%", "bf16,evict=pyramidkv:25%"]
        low_rank += [f"bf16,rank={head_dim * 3 // 4}"] if head_dim else []
    if head_dim:
        half = f"rank={head_dim // 2}/{head_dim}"
        stacks += [f"fp4_e2m1,{half}", f"fp8_e4m3,{half},evict=snapkv:50%"]
    return [*formats, *low_rank, *evict, *stacks]


def granularity_sweep(head_dim: int | None) -> list[str]:
    """The same formats with scales for ever fewer numbers; groups that do not divide head_dim are left out."""
    return [
        f"{name}:{choice}" + (",scales=amax" if choice in STATIC else "")
        for name, choices in SWEEP.items()
        for choice in choices
        if not choice.isdigit() or head_dim is None or head_dim % int(choice) == 0
    ]


class Evaluator:
    """A model and a sample; `evaluate` measures a scheme.

    model, tokenizer   of transformers, the model not patched; it is patched while this object lives: call `close`
    text, text_name    prose that is scored; the first tokens fit the projections
    settings           how much is measured
    calibration        a file of projections; None: fitted to the text's first tokens when a scheme asks
    schemes            what `need` judges before anything is measured
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        text: str,
        text_name: str,
        settings: Settings,
        calibration: str | None = None,
        step: Step = lambda scheme, done, total: None,
        schemes: Sequence[str] = (),
    ) -> None:
        self.model, self.tokenizer, self.name, self.settings, self.step = model, tokenizer, name, settings, step
        self.text, self.text_name, self.calibration_file = text, text_name, calibration
        self.sample = passages(tokenizer, text, settings, getattr(model.config, "max_position_embeddings", None))
        self.total = sum(passage.ids.shape[0] * passage.length for passage in self.sample) + settings.new_tokens
        need_dense(model, name)
        if calibration is not None:
            self.calibration = calibrated(model, tokenizer, calibration)
        for scheme in schemes:
            self.need(scheme)
        patch(model)
        self.baseline = self._run(BASELINE, None)

    def close(self) -> None:
        """Give the model back as it was."""
        unpatch(self.model)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def head_dim(self) -> int | None:
        """Dims of a head; None where latent rows are cached."""
        config = self.model.config
        if getattr(config, "kv_lora_rank", None):
            return None
        dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return dim

    @functools.cached_property
    def calibration(self) -> Any:
        """Projections of the model, fitted when they are first asked for."""
        self.step("fitting low-rank projections", 0, 1)
        unpatch(self.model)
        try:
            return calibrated(self.model, self.tokenizer, self.calibration_file, self.text)
        finally:
            patch(self.model)

    @functools.cached_property
    def largest(self) -> Any:
        """Largest keys and values, for static scales, measured when they are first asked for."""
        unpatch(self.model)
        try:
            return largest_numbers(self.model, self.tokenizer, self.text)
        finally:
            patch(self.model)

    def need(self, scheme: str) -> None:
        """Raise ArgumentError for a scheme that the model or the sample cannot have; nothing runs."""
        wanted = parse(scheme)
        need_possible(wanted, self.model)
        if wanted.evict is not None:
            policy, slots = wanted.evict.options["evict"], wanted.evict.options.get("summary_slots", 0)
            for passage in self.sample:
                policy.need_room(policy.tokens(passage.context), slots)

    def evaluate(self, scheme: str) -> dict[str, Any]:
        """The figures of one scheme; raises ArgumentError where the model cannot have it."""
        return self._figures(scheme, self._run(scheme, self.baseline).scores)

    def _run(self, scheme: str, baseline: measure.Baseline | None) -> measure.Baseline:
        options = options_of(parse(scheme), self.model, lambda: self.calibration, lambda: self.largest)
        if options.get("sparse") is not None:
            options["sparse_prompt"] = True  # every scored token chooses, as in decoding
        made = functools.partial(new_cache, self.model, **options)
        done = 0

        def progress(tokens: int) -> None:
            nonlocal done
            done += tokens
            self.step(scheme, done, self.total)

        name = cache_argument(self.model)
        return measure.run(self.model, made, name, self.sample, self.settings, baseline, progress)

    def _figures(self, scheme: str, scores: measure.Scores) -> dict[str, Any]:
        full = self.baseline.scores
        count, perplexity = scores.count("prose") + scores.count("code"), math.exp(scores.loss("prose"))
        found: dict[str, Any] = {
            "name": scheme,
            "perplexity": round(perplexity, 5),
            "perplexity_change": round(perplexity / math.exp(full.loss("prose")) - 1, 6),
            "perplexity_change_margin": round(
                perplexity / math.exp(full.loss("prose")) * measure.margin(scores, full), 6
            ),
            "kl": round(scores.kl / count, 6),
            "top1_agreement": round(scores.agreed / count, 5),
            "needle": _share(scores.right.get("needle", [])),
            "exact_recall": _share(scores.right.get("exact", [])),
            "code": {
                "perplexity": round(math.exp(scores.loss("code")), 5),
                "accuracy": round(scores.hits / scores.count("code"), 5),
                "same_continuation": _same(scores.generated, full.generated),
            },
            "repetition": round(measure.repetition(scores.generated), 4),
            "loss_by_position": measure.by_position(scores),
            "cache_bytes": scores.cache_bytes,
            "cache_bytes_fp16": scores.cache_bytes_fp16,
            "tokens_per_s": round(scores.tokens / scores.seconds, 2),
            "backends": scores.backends,
        }
        if scores is full:  # nothing to compare with
            for key in ("perplexity_change", "perplexity_change_margin", "kl", "top1_agreement"):
                del found[key]
            del found["code"]["same_continuation"]
        return found

    def document(self, schemes: Sequence[str], strict: bool = True) -> dict[str, Any]:
        """The baseline and every scheme. strict: a scheme that the model cannot have raises; else it is left out."""
        found, left_out = [], []
        for scheme in schemes:
            try:
                found.append(self.evaluate(scheme))
            except ArgumentError as error:
                if strict:
                    raise
                left_out.append({"name": scheme, "reason": str(error)})
        best = pareto(found)
        for entry in found:
            entry["pareto"] = entry["name"] in best
        configuration = self.configuration()
        return {
            "model": self.name,
            "device": str(self.model.device),
            "text_tokens": self.baseline.scores.count("prose"),
            "code_tokens": self.baseline.scores.count("code"),
            "configuration": configuration,
            "configuration_id": configuration_id(configuration),
            "baseline": self._figures(BASELINE, self.baseline.scores),
            "schemes": found,
            "left_out": left_out,
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
        }

    def configuration(self) -> dict[str, Any]:
        """All that figures rest on besides the scheme and the machine's speed."""
        settings = self.settings
        return {
            "model": self.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "text": self.text_name,
            "text_sha256": texts.digest(self.text),
            "sample_sha256": digest(self.sample),
            "contexts": list(settings.contexts),
            "rows": settings.rows,
            "scored": settings.scored,
            "chunk": settings.chunk,
            "code": [settings.code_context, settings.code_scored],
            "new_tokens": settings.new_tokens,
            "sampling": "greedy, teacher-forced",
            "calibration": self.calibration_file or f"first {texts.CALIBRATION_TOKENS} tokens of the text",
        }


def configuration_id(configuration: dict[str, Any]) -> str:
    """16 hex digits that two files share if and only if their figures may be compared."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:16]


def pareto(found: Sequence[dict[str, Any]]) -> set[str]:
    """Names of the schemes that no other one beats in bytes and perplexity both."""

    def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
        pairs = [(one[key], other[key]) for key in ("cache_bytes", "perplexity")]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    return {entry["name"] for entry in found if not any(beats(other, entry) for other in found)}


def _share(found: Sequence[bool]) -> float | None:
    return round(sum(found) / len(found), 4) if found else None


def _same(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens of the continuation are those of full precision before the first that is not."""
    pairs = enumerate(zip(tokens, expected, strict=True))
    return next((i for i, (token, wanted) in pairs if token != wanted), len(tokens))
