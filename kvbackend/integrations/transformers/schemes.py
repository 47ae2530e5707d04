"""A scheme, such as "fp4_e2m1,rank=32,evict=snapkv:25%", as options of a PagedCache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import compress, formats, texts
from ...cache import GqaLayer, MlaLayer, Sparsity
from ...compress import Calibration, lowrank
from ...errors import ArgumentError
from ...planner.schemes import FULL_PRECISION, Scheme, need_layers, need_runnable, parse, ranks, stretched
from .families import FAMILIES
from .store import Options, Store, projections

DEFAULT_BLOCK = 16  # tokens
LARGEST_CODE = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp4_e2m1": 6.0, "nvfp4": 448.0 * 6.0}
LEAST_AMAX = 1e-4  # of a channel that is never used

Largest = list[tuple[Tensor, Tensor]]  # magnitudes of the keys and values of every layer


def options_of(
    scheme: str | Scheme,
    model: Any,
    calibration: Callable[[], Calibration] | None = None,
    largest: Callable[[], Largest] | None = None,
    block_size: int | None = None,
) -> dict[str, Any]:
    """The options that make `patch` or `new_cache` of a model store tokens as a scheme says.

    scheme        as for `kvbackend plan`; "auto" or "native" is the dtype of the model's keys
    model         a transformers model, patched or not
    calibration   called where the scheme has a rank: projections of at least its ranks. None: refused
    largest       called where the scheme has scales=amax: `largest_numbers` of the model. None: refused
    block_size    None: 16, or the group of tokens that a format codes together
    """
    wanted = parse(scheme) if isinstance(scheme, str) else scheme
    config = model.config.get_text_config(decoder=True)
    num_layers = config.num_hidden_layers
    need_runnable(wanted)
    need_layers(wanted, num_layers)
    names = _formats(wanted, num_layers)
    spans = [
        fmt.group
        for name in dict.fromkeys(names)
        for side in formats.pair(name)
        if side != "auto" and (fmt := formats.get(side)).granularity == "kivi"
    ]
    options: dict[str, Any] = dict(
        kv_format=names[0] if len(set(names)) == 1 else names,
        block_size=block_size or max([DEFAULT_BLOCK, *(span for span in spans if span)]),
        keep_recent=wanted.recent,
        keep_sinks=wanted.sinks,
    )
    if (wanted.recent or wanted.sinks or spans) and model.dtype is torch.float32:
        options["dtype"] = getattr(torch, formats.get(FULL_PRECISION).storage)
    if wanted.evict is not None:
        options |= wanted.evict.options
    if wanted.topk:
        options["sparse"] = Sparsity(stretched("topk", wanted.topk, num_layers), reselect=wanted.reselect)
    if wanted.scales is not None:
        options["scales"] = _scales(wanted, names, largest)
    if wanted.rank or wanted.ratios:
        options["low_rank"] = _low_rank(wanted, num_layers, calibration)
    return options


def need_dense(model: Any, name: str) -> None:
    """Raise ArgumentError for a model whose cache is no PagedCache, and so has neither schemes nor their figures."""
    if model.config.model_type in FAMILIES:
        raise ArgumentError(
            f"model is {name}, whose attention is sparse; commands run dense caches only: call patch and generate from "
            f"Python"
        )


def need_possible(scheme: Scheme, model: Any) -> None:
    """Raise ArgumentError for a scheme that the cache of a model cannot have: one is made, of shapes alone.

    Stand-ins take the place of what is fitted or measured.
    """
    config = model.config.get_text_config(decoder=True)
    num_layers, latent = config.num_hidden_layers, getattr(config, "kv_lora_rank", None)
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    one = torch.ones(heads, dim)
    options = options_of(
        replace(scheme, rank=None, value_rank=None, ratios=()), model, largest=lambda: [(one, one)] * num_layers
    )
    if scheme.rank or scheme.ratios:
        whole = lowrank.identity(heads, dim)
        sides = [ranks(scheme, num_layers, dim, value) for value in (False, True)]
        options["low_rank"] = [
            (whole.truncated(key), whole.truncated(value)) for key, value in zip(*sides, strict=True)
        ]
    options["rope_cos_sin"] = torch.empty(1, dim, device="meta")
    made = Options(**options)
    spec = MlaLayer(latent, config.qk_rope_head_dim) if latent else GqaLayer(heads, dim)
    Store(
        made, spec, num_layers, 1, made.page_dtype() or model.dtype, torch.device("meta"), lambda name, arguments: None
    )


def _formats(scheme: Scheme, num_layers: int) -> list[str]:
    """The kv_format of every layer."""
    own = (scheme.key, scheme.value or scheme.key)
    named = []
    for layer in range(num_layers):
        sides = own
        for first, last, name in scheme.by_layer:
            if first <= layer <= last:
                sides = (name, name)
        for side in sides:
            if side in formats.record_names():
                formats.get(side)  # says that a record is no format of a split cache
        key, value = ("auto" if side == "native" else side for side in sides)
        named.append(key if key == value else f"{key}/{value}")
    return named


def _scales(scheme: Scheme, names: list[str], largest: Callable[[], Largest] | None) -> list[dict[str, Tensor]]:
    """The static scales of every layer whose format has some: the largest number becomes the largest code."""
    if largest is None:
        raise ArgumentError(
            f"the scheme {scheme.name!r} has scales=amax but nothing was measured; scales are fitted to keys and "
            f"values as a model makes them: leave scales out"
        )
    found = []
    for name, sides in zip(names, largest(), strict=True):
        scales = {}
        for argument, side, amax in zip(("k_scale", "v_scale"), formats.pair(name), sides, strict=True):
            if side == "auto" or side.partition(":")[0] not in LARGEST_CODE:
                continue
            fmt, amax = formats.get(side), amax.clamp(min=LEAST_AMAX)
            per = {"tensor": amax.amax()[None], "head": amax.amax(-1), "channel": amax}
            if fmt.global_scale:
                scales[argument] = per["tensor"] / LARGEST_CODE[fmt.name]
            elif fmt.granularity in per:
                scales[argument] = per[fmt.granularity] / LARGEST_CODE[fmt.name]
        found.append(scales)
    return found


def largest_numbers(model: Any, tokenizer: Any, text: str | None = None) -> Largest:
    """The largest magnitudes of keys (after RoPE) and values of each layer, [Hk, D] each, over a text's beginning.

    model   not patched. text: as for `calibrated`
    """
    count = min(texts.CALIBRATION_TOKENS, model.config.max_position_embeddings)
    ids = texts.first_tokens(tokenizer, texts.builtin() if text is None else text, count)
    with torch.no_grad():
        output = model.base_model(ids[None].to(model.device), use_cache=True)
    cache = output.cache if "cache" in output else output.past_key_values
    return [(layer.keys[0].float().abs().amax(1), layer.values[0].float().abs().amax(1)) for layer in cache.layers]


def _low_rank(scheme: Scheme, num_layers: int, calibration: Callable[[], Calibration] | None) -> Any:
    if calibration is None:
        raise ArgumentError(
            f"the scheme {scheme.name!r} has a rank but there is no calibration; projections are fitted to a model: "
            f"pass one, or its file"
        )
    found = calibration()
    dim, most = found.about["head_dim"], found.key_ranks + found.value_ranks
    wanted = [ranks(scheme, num_layers, dim, value) for value in (False, True)]
    if any(rank < dim and rank > have for rank, have in zip(wanted[0] + wanted[1], most, strict=True)):
        raise ArgumentError(
            f"the scheme {scheme.name!r} wants ranks up to {max(r for r in wanted[0] + wanted[1] if r < dim)}; the "
            f"calibration has {min(most)}: calibrate with a higher rank"
        )
    return projections(found, *wanted)


def calibrated(model: Any, tokenizer: Any, path: str | Path | None = None, text: str | None = None) -> Calibration:
    """The calibration in a file; or one of all ranks below head_dim, fitted to the beginning of a text.

    model   not patched. text: None is the built-in one; its first tokens are taken, which `kvbackend eval` never scores
    """
    if path is not None:
        found = Calibration.load(path)
        config = model.config.get_text_config(decoder=True)
        if found.about["num_layers"] != config.num_hidden_layers or found.about["model"] != config.model_type:
            raise ArgumentError(
                f"{path} was fitted to {found.about['model']} of {found.about['num_layers']} layers; this model is "
                f"{config.model_type} of {config.num_hidden_layers}: calibrate this one"
            )
        return found
    dims = [module.head_dim for module in model.modules() if hasattr(module, "k_proj") and hasattr(module, "head_dim")]
    if not dims:
        raise ArgumentError(
            f"{type(model).__name__} has no k_proj; low rank is for Llama-like decoders: leave the rank out"
        )
    ids = texts.first_tokens(tokenizer, texts.builtin() if text is None else text, texts.CALIBRATION_TOKENS)
    context = model.config.max_position_embeddings
    return compress.calibrate(model, list(ids.split(min(1024, context))), rank=max(1, dims[0] - 1))


__all__ = ["calibrated", "largest_numbers", "need_dense", "need_possible", "options_of"]
