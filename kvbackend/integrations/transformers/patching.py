"""`patch(model)`: the one call that makes a model decode through kvbackend, or says why it cannot."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import PreTrainedModel

from ... import formats
from ... import profile as profiles
from ...errors import ArgumentError, UnsupportedError
from . import families, sparse
from .attention import NAME, latent_rows, register
from .cache import PagedCache
from .rope import rope_table
from .schemes import calibrated, options_of
from .sparse import SparseCache
from .store import Options

TESTED = ((5, 19), (5, 24))  # first and last release line that the tests run against
LAYER_TYPES = ("full_attention", "sliding_attention")
SPARSE_OPTIONS = {"block_size", "num_blocks", "kv_format"}  # that a SparseCache has too

Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass(frozen=True)
class Patch:
    """What `patch` left on a model, so that `unpatch` can take it back."""

    previous: str
    options: dict[str, Any]


def patch(model: Model, *, profile: str | os.PathLike[str] | None = None, **options: Any) -> Model:
    """Make a model decode through kvbackend: its attention, its mask, and the cache that `generate` makes.

    model     a causal decoder: Llama-like (MHA, GQA, MQA; sliding windows, softcap, sinks), DeepSeek-V2/V3-like (MLA,
              which then runs absorbed over its latent rows), or a sparse one, whose attention modules then run through
              `kvbackend.models`: DeepSeek-V3.2, GLM-5 or DeepSeek-V4. It is changed in place
    profile   a file that `kvbackend tune` wrote, whose scheme gives the options that are not given here
    options   those of PagedCache: block_size, num_blocks, kv_format, keep_recent, evict, low_rank and so on; a sparse
              model has the first two only
    Returns the model. Raises UnsupportedError with every reason if the model has what the ops cannot express; it is
    unchanged then. `unpatch(model)` takes everything back. Patching again changes the options.
    """
    if profile is not None:
        options = {**_profile_options(model, profile), **options}
    PagedCache(1, **options)  # wrong options are told now, not at the first generate
    unpatch(model)
    reasons = list(unsupported(model))
    if not reasons and is_sparse(model):
        reasons = list(_option_reasons(options))
    if reasons:
        raise UnsupportedError(
            f"{type(model).__name__} cannot run through kvbackend:" + "".join(f"\n    {reason}" for reason in reasons)
        )
    register()
    previous = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    # into the instance's own dict: a module's attributes are for tensors and modules
    vars(model)["_kvbackend"] = Patch(previous, options)
    if is_sparse(model):
        sparse.patch(families.family_of(model))
    else:
        for module in latent_modules(model):
            vars(module)["expand_kv"] = latent_rows
    if model.can_generate():
        vars(model)["generate"] = functools.partial(generate, model)
    return model


def _profile_options(model: PreTrainedModel, path: str | os.PathLike[str]) -> dict[str, Any]:
    found = profiles.read(path)
    return options_of(found.scheme, model, lambda: calibrated(model, None, found.calibration))


def unpatch(model: Model) -> Model:
    """Give a model its own attention and cache back. A model that is not patched stays as it is."""
    done = vars(model).pop("_kvbackend", None) if isinstance(model, nn.Module) else None
    if done is not None:
        vars(model).pop("generate", None)
        sparse.unpatch(model)
        for module in latent_modules(model):
            vars(module).pop("expand_kv", None)
        model.set_attn_implementation(done.previous)
    return model


def new_cache(model: PreTrainedModel, **options: Any) -> PagedCache | SparseCache:
    """An empty cache for a model, with the options of its `patch` unless given here: a SparseCache for a sparse one."""
    done = getattr(model, "_kvbackend", None)
    options = {**(done.options if done else {}), **options}
    if is_sparse(model):
        sizes = {name: options[name] for name in SPARSE_OPTIONS & options.keys()}
        return SparseCache(families.family_of(model), **sizes)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if "rope_cos_sin" not in options and PagedCache(1, **options).options.before_rope:
        options["rope_cos_sin"] = rope_table(model)
    return PagedCache(num_layers, **options)


def is_sparse(model: PreTrainedModel) -> bool:
    """Whether the model's whole attention modules run through `kvbackend.models`."""
    return model.config.model_type in families.FAMILIES


def _option_reasons(options: dict[str, Any]) -> Iterator[str]:
    """Every option that a sparse model does not have."""
    defaults = {field.name: field.default for field in fields(Options)}
    given = [name for name, value in options.items() if name not in SPARSE_OPTIONS and value != defaults[name]]
    if given:
        yield (
            f"{', '.join(given)} is given; a sparse model keeps what its layers were trained with: "
            f"pass no other option than {', '.join(sorted(SPARSE_OPTIONS))}"
        )
    if options.get("kv_format", "auto") not in ("auto", *formats.record_names()):
        yield (
            f"kv_format is {options['kv_format']!r}; a sparse model keeps rows as they are, or in records: pass "
            f"'auto', v32_fp8_656 (DeepSeek-V3.2, GLM-5) or v4_fp8_584 (DeepSeek-V4)"
        )


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: "cache" from transformers 5.2x on, "past_key_values" before."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def generate(model: PreTrainedModel, *args: Any, cache: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
    """The model's own `generate`, with a new PagedCache unless one is given, under either of its names."""
    if cache is not None and past_key_values is not None:
        raise ArgumentError("cache and past_key_values are both given; they are two names of one thing: pass one")
    given = cache if cache is not None else past_key_values
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or model.generation_config
    other = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
    if other is not None:
        raise ArgumentError(
            f"cache_implementation is {other!r}; a patched model generates with kvbackend's pages: drop it, or call "
            f"unpatch(model)"
        )
    wanted = SparseCache if is_sparse(model) else PagedCache
    if given is not None and not isinstance(given, wanted):
        raise ArgumentError(
            f"cache is a {type(given).__name__}; a patched model takes a {wanted.__name__}: pass new_cache(model), or "
            f"call unpatch(model)"
        )
    if given is None and kwargs.get("use_cache", getattr(config, "use_cache", True)) is not False:
        given = new_cache(model)
    if given is not None:
        kwargs[cache_argument(model)] = given
    own: Any = type(model)
    return own.generate(model, *args, **kwargs)


def latent_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The MLA modules: those that cache latent rows and expand them."""
    return (module for module in model.modules() if hasattr(module, "expand_kv"))


def unsupported(model: PreTrainedModel) -> Iterator[str]:
    """Every reason why `patch` refuses a model."""
    if not isinstance(model, PreTrainedModel):
        yield f"model is {type(model).__name__}; it must be a transformers PreTrainedModel: load it with transformers"
        return
    yield from _version_reasons()
    config = model.config
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder; kvbackend serves decoders: use a decoder-only model"
    if config.get_text_config(decoder=True) is not config:
        yield "it has parts besides a text decoder; only that is served: load its text model alone"
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        yield "its attention is not replaceable (_supports_attention_backend); it must be: use a newer model class"
    if is_sparse(model):
        yield from families.unsupported(model)
        return
    if getattr(model, "_is_stateful", False):
        yield "it keeps state besides keys and values; pages hold keys and values only: use another model"
    strange = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in LAYER_TYPES})
    if strange:
        yield f"its layer types include {', '.join(strange)}; served are {', '.join(LAYER_TYPES)}: use another model"
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        yield "its layers read each other's keys; each layer must own its pages: use another model"
    if getattr(config, "attention_chunk_size", None) and not strange:
        yield "its attention is chunked; served are full attention and sliding windows: use another model"
    if len({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}) > 1:
        yield "it is spread over several devices; one cache lives on one: load it without device_map"
    for module in latent_modules(model):
        reasons = list(_latent_reasons(module))
        yield from reasons
        if reasons:
            break  # the other layers say the same


def _version_reasons() -> Iterator[str]:
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not TESTED[0] <= found <= TESTED[1]:
        first, last = (".".join(map(str, version)) for version in TESTED)
        yield f"transformers is {transformers.__version__}; tested are {first} to {last}: install one of these"


def _latent_reasons(module: Any) -> Iterator[str]:
    if getattr(module, "indexer", None) is not None:
        yield "its MLA selects tokens with an indexer; served are deepseek_v32 and glm_moe_dsa: use one of these"
        return
    absent = [
        name
        for name in ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads")
        if getattr(module, name, None) is None
    ]
    if absent:
        yield f"{type(module).__name__} lacks {', '.join(absent)}; MLA is absorbed with these: use DeepSeek-V2 or V3"
        return
    projection = module.kv_b_proj
    if type(projection) is not nn.Linear or not projection.weight.is_floating_point():
        yield f"kv_b_proj is {type(projection).__name__}; a plain nn.Linear can be absorbed: load it unquantized"
        return
    rows = module.num_heads * (module.qk_nope_head_dim + module.v_head_dim)
    if projection.bias is not None or tuple(projection.weight.shape) != (rows, module.kv_lora_rank):
        bias = "no bias" if projection.bias is None else "a bias"
        yield (
            f"kv_b_proj has weight {list(projection.weight.shape)} and {bias}; absorption needs "
            f"[{rows}, {module.kv_lora_rank}] and no bias: use DeepSeek-V2 or V3"
        )
