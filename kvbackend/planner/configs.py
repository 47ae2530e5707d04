"""From a Hugging Face `config.json`, a built-in name or a shape to a `Model`. What is missing is named, not guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from .. import formats
from ..errors import ArgumentError
from .shapes import Layer, Model, dsa_layers, heads_layers, mla_layers, v4_layers, v41_layers

Source = Model | Mapping[str, Any] | str | Path

# Other spellings of a config field, the most common first.
_SPELLINGS = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "dtype": ("dtype", "torch_dtype"),
    "n_routed_experts": ("n_routed_experts", "num_local_experts", "num_experts"),
}

# Architectures whose own code defines an absent field so. For all others an absent field is an error.
# fmt: off
_HEAD_DIM_IS_HIDDEN_OVER_HEADS = frozenset({
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "phi", "phi3",
    "gpt2", "gpt_neox", "opt", "bloom", "falcon", "starcoder2", "gpt_bigcode", "olmo", "olmo2", "granite", "stablelm",
    "smollm3",
})
_KV_HEADS_ARE_HEADS = frozenset({"llama", "phi", "gpt2", "gpt_neox", "opt", "bloom", "olmo"})
_EVERY_LAYER_SLIDES = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})

# Fields that change the cache in a way that is not counted here, if set.
_NOT_COUNTED = (
    "is_encoder_decoder", "num_kv_shared_layers", "cross_attention_layers", "attention_chunk_size",
    "linear_attn_config", "attn_type_list", "layers_block_type", "block_types", "hybrid_override_pattern",
    "global_head_dim", "num_global_key_value_heads", "cla_share_factor", "attn_layer_period", "mamba_d_state",
    "zero_expert_num", "per_layer_config",
)
# fmt: on

_V4_KINDS = {0: "swa", 4: "csa", 128: "hca"}
_V4_LAYER_TYPES = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}


def load(source: Source) -> Model:
    """The model behind a config file, a folder that holds one, a built-in name, a mapping of config fields or a Model.

    Raises ArgumentError for a name or file that does not exist, for fields that are missing and for architectures whose
    cache is not understood.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, Mapping):
        return from_config(source, str(source.get("model_type") or "config"))
    path = Path(source)
    if path.exists():
        return _from_file(path)
    return builtin(str(source))


def builtin_names() -> tuple[str, ...]:
    """Names of the built-in models, without aliases."""
    return tuple(_builtin_table())


def builtin(name: str) -> Model:
    """The built-in model called `name` (any case, an organisation in front is ignored), or its alias."""
    wanted = name.rsplit("/", 1)[-1].lower()
    table = _builtin_table()
    found = next((key for key, entry in table.items() if wanted in (key, *entry.get("aliases", ()))), None)
    if found is None:
        raise ArgumentError(
            f"MODEL is {name!r}; it must be a config.json, a folder that holds one, or one of {', '.join(table)}: "
            f"check the path, or give a shape with --layers, --kv-heads and --head-dim"
        )
    entry = table[found]
    known = {key: entry[key] for key in _WEIGHT_FACTS if key in entry}
    model = from_config(entry["config"], found)
    return replace(model, source=entry["source"], notes=(*model.notes, *entry.get("notes", ())), **known)


_WEIGHT_FACTS = ("parameters", "active_parameters", "weights_dtype", "experts_dtype", "weights_bytes")


@cache
def _builtin_table() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("models.json").read_text("utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    for entry in table.values():
        if base := entry.get("same_as"):
            config = table[base]["config"] | entry["config"]
            entry.update(table[base] | entry | {"config": config, "aliases": entry.get("aliases", [])})
    return table


def _from_file(path: Path) -> Model:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ArgumentError(f"MODEL is {str(path)!r}, a folder without config.json: pass the folder of a checkpoint")
    try:
        fields = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{file} is no JSON ({error}); it must be a model's config.json: pass that file") from error
    if not isinstance(fields, dict):
        raise ArgumentError(f"{file} holds a {type(fields).__name__}; a config.json holds an object: pass that file")
    model = from_config(fields, path.stem if path.is_file() and path.stem != "config" else file.resolve().parent.name)
    return replace(model, weights_bytes=_checkpoint_bytes(file.parent), source=str(file))


def _checkpoint_bytes(folder: Path) -> int | None:
    """Bytes of the weights beside a config, if they are there."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return int(json.loads(index.read_text("utf-8"))["metadata"]["total_size"])
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


MOST, MOST_LAYERS = 1 << 40, 100_000  # beyond these a config is wrong, and a list of layers fills the memory


class _Fields:
    """A config's fields under all their spellings; remembers what was asked for and is not there."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name
        self.missing: list[str] = []

    def get(self, field: str, default: Any = None) -> Any:
        for spelling in _SPELLINGS.get(field, (field,)):
            if self.config.get(spelling) is not None:
                return self.config[spelling]
        return default

    def size(self, field: str, *, least: int = 1) -> int:
        """A whole number from `least` on; a missing one is noted, and stands as `least` until `check`."""
        value, most = self.get(field), MOST_LAYERS if field.endswith("layers") else MOST
        if value is None:
            self.missing.append(field)
            return least
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ArgumentError(
                f"{field} of {self.name} is {value!r}; it must be a whole number from {least} to {most}: fix it"
            )
        return value

    def sizes(self, field: str, *, least: int = 0) -> list[int]:
        """A list of whole numbers."""
        values = self.get(field)
        if values is None:
            self.missing.append(field)
            return []
        if not isinstance(values, list) or any(not isinstance(value, int) or value < least for value in values):
            raise ArgumentError(f"{field} of {self.name} is {values!r}; it must list numbers from {least} on: fix it")
        return values

    def check(self, kind: str) -> None:
        """Refuse if anything that was asked for is missing."""
        if self.missing:
            raise ArgumentError(
                f"the config of {self.name} lacks {', '.join(self.missing)}; the cache of {kind} cannot be counted "
                f"without: add them, or give a shape with --layers, --kv-heads and --head-dim"
            )


def from_config(config: Mapping[str, Any], name: str) -> Model:
    """The model that a Hugging Face config describes; the kind of attention is read off its fields."""
    text = config.get("text_config")
    fields = _Fields(dict(config) | dict(text) if isinstance(text, Mapping) else config, name)
    for field in _NOT_COUNTED:
        if fields.get(field):
            raise ArgumentError(
                f"the config of {name} sets {field} = {_short(fields.get(field))}, which changes its cache in a way "
                f"that this planner does not count; known are MHA, GQA, MQA, sliding windows, MLA, DSA, CSA/HCA and "
                f"CSA2: give the layers that cache tokens as a shape with --layers, --kv-heads and --head-dim"
            )
    if fields.get("kv_source_layer_ids") is not None:
        model = _v41(fields)
    elif fields.get("compress_ratios") is not None or fields.get("compress_rates") is not None:
        model = _v4(fields)
    elif fields.get("kv_lora_rank") is not None:
        model = _mla(fields)
    else:
        model = _heads(fields)
    return replace(
        model,
        max_context=fields.size("max_position_embeddings") if fields.get("max_position_embeddings") else None,
        expert_parameters=_expert_parameters(fields),
        has_experts=fields.get("n_routed_experts") is not None,
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _dtype(fields: _Fields) -> tuple[str, tuple[str, ...]]:
    """The format of the model's own dtype, and a note where the config does not say it."""
    named = fields.get("dtype")
    if named in ("float32", "float16", "bfloat16"):
        return formats.of_dtype(named).name, ()
    return "bf16", (f"the config names {'no dtype' if named is None else f'dtype {named}'}; native is taken as bf16",)


def _expert_parameters(fields: _Fields) -> int | None:
    """Parameters of the routed experts (three matrices each), None if the config is not enough to tell."""
    experts, hidden = fields.get("n_routed_experts"), fields.get("hidden_size")
    width, layers = fields.get("moe_intermediate_size"), fields.get("num_hidden_layers")
    if not all(isinstance(value, int) for value in (experts, hidden, width, layers)):
        return None
    return int(experts * 3 * hidden * width * (layers - fields.get("first_k_dense_replace", 0)))


def _heads(fields: _Fields) -> Model:
    kind = fields.get("model_type", "")
    layers, heads = fields.size("num_hidden_layers"), fields.get("num_attention_heads")
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        kv_heads = 1
    elif fields.get("num_key_value_heads") is None and kind in _KV_HEADS_ARE_HEADS and heads:
        kv_heads = heads
    else:
        kv_heads = fields.size("num_key_value_heads")
    if fields.get("head_dim") is None and kind in _HEAD_DIM_IS_HIDDEN_OVER_HEADS and heads:
        head_dim = fields.size("hidden_size") // heads
    else:
        head_dim = fields.size("head_dim")
    value_dim = fields.size("v_head_dim") if fields.get("v_head_dim") is not None else head_dim
    fields.check("attention heads")
    if heads and heads % kv_heads:
        raise ArgumentError(
            f"num_key_value_heads of {fields.name} is {kv_heads}; it must divide the {heads} attention heads: fix it"
        )
    native, notes = _dtype(fields)
    attention = "mqa" if kv_heads == 1 else "mha" if heads == kv_heads else "gqa"
    return Model(
        fields.name,
        attention,
        heads_layers(layers, kv_heads, head_dim, value_dim, _windows(fields, layers)),
        {"kv": native},
        block_size=16,
        query_heads=heads,
        key_dim=head_dim,
        value_dim=value_dim,
        notes=notes,
    )


def _windows(fields: _Fields, layers: int) -> list[int | None]:
    """The sliding window of each layer in tokens, None where a layer attends to everything."""
    window, types = fields.get("sliding_window"), _layer_types(fields, layers, "full_attention", "sliding_attention")
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    elif window is None or fields.get("use_sliding_window") is False:
        slides = [False] * layers
    elif (first := fields.get("max_window_layers")) is not None and fields.get("use_sliding_window"):
        slides = [index >= first for index in range(layers)]
    elif pattern := fields.get("sliding_window_pattern"):
        slides = [(index + 1) % pattern != 0 for index in range(layers)]
    elif fields.get("model_type") in _EVERY_LAYER_SLIDES:
        slides = [True] * layers
    else:
        fields.missing.append("layer_types (which layers use the sliding_window)")
        fields.check("a sliding window")
    if any(slides):
        window = fields.size("sliding_window")
        fields.check("a sliding window")
    return [window if slide else None for slide in slides]


def _layer_types(fields: _Fields, layers: int, *known: str) -> list[str] | None:
    """The kind of each layer where the config says it; refused if one is not known."""
    types: list[str] | None = fields.get("layer_types")
    if types is None:
        return None
    unknown = sorted(set(types) - set(known))
    if unknown or len(types) < layers:
        raise ArgumentError(
            f"layer_types of {fields.name} has {len(types)} entries{', also ' if unknown else ''}{', '.join(unknown)}; "
            f"it must give {' or '.join(known)} for each of the {layers} layers: count the layers that cache tokens as "
            f"a shape with --layers"
        )
    return types[:layers]


def _mla(fields: _Fields) -> Model:
    layers, rank, rope = (fields.size(f) for f in ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim"))
    _layer_types(fields, layers, "full_attention", "indexed_attention")
    native, notes = _dtype(fields)
    indexed = fields.get("index_topk") is not None or fields.get("index_head_dim") is not None
    per_layer: tuple[Layer, ...]
    natives = {"kv": native}
    if indexed:
        index_dim, topk = fields.size("index_head_dim"), fields.size("index_topk")
        fields.check("MLA with an indexer")
        per_layer = dsa_layers(layers, rank, rope, index_dim, topk, _owns_indexer(fields, layers))
        published = (rank, rope, index_dim) == (512, 64, 128)
        natives = {"kv": "v32_fp8_656", "index": "index_fp8_132"} if published else {"kv": native, "index": native}
        notes = () if published else notes
    else:
        fields.check("MLA")
        per_layer = mla_layers(layers, rank, rope)
    nope = fields.get("qk_nope_head_dim")
    return Model(
        fields.name,
        "mla+dsa" if indexed else "mla",
        per_layer,
        natives,
        block_size=64,
        query_heads=fields.get("num_attention_heads"),
        key_dim=nope + rope if nope else None,
        value_dim=fields.get("v_head_dim"),
        notes=notes,
    )


def _owns_indexer(fields: _Fields, layers: int) -> Sequence[bool]:
    """Which layers run an indexer of their own: `indexer_types`, or the schedule that GLM-5's code derives."""
    if (types := fields.get("indexer_types")) is not None:
        if len(types) != layers or set(types) - {"full", "shared"}:
            raise ArgumentError(
                f"indexer_types of {fields.name} is {_short(types)}; it must give full or shared for each of the "
                f"{layers} layers: fix it"
            )
        return [kind == "full" for kind in types]
    every, offset = fields.get("index_topk_freq", 1), fields.get("index_skip_topk_offset", 2)
    return [max(index - offset + 1, 0) % every == 0 for index in range(layers)]


def _compressed(fields: _Fields, attention: str, layers: tuple[Layer, ...], natives: dict[str, str]) -> Model:
    """A DeepSeek-V4 or V4.1 model; other widths than the published ones have no record, so their native is bf16."""
    published = (fields.get("head_dim"), fields.get("index_head_dim")) == (512, 128)
    return Model(
        fields.name,
        attention,
        layers,
        natives if published else dict.fromkeys(natives, "bf16"),
        block_size=256,
        query_heads=fields.get("num_attention_heads"),
    )


def _v4(fields: _Fields) -> Model:
    layers = fields.size("num_hidden_layers")
    if fields.get("compress_ratios") is not None:
        ratios = fields.sizes("compress_ratios")
        unknown = sorted(set(ratios) - set(_V4_KINDS))
        kinds = [(_V4_KINDS.get(ratio, ""), ratio) for ratio in ratios]
    else:
        types, rates = _layer_types(fields, layers, *_V4_LAYER_TYPES) or [], fields.get("compress_rates")
        unknown = [rates.get(kind) for kind in set(types) - {"sliding_attention"} if not rates.get(kind)]
        kinds = [(_V4_LAYER_TYPES[kind], rates.get(kind, 0)) for kind in types]
    if unknown or len(kinds) < layers:
        raise ArgumentError(
            f"compress_ratios of {fields.name} gives {len(kinds)} layers{f', also {unknown[0]}' if unknown else ''}; "
            f"it must give 0, 4 or 128 for each of the {layers} layers (draft layers may follow): fix it"
        )
    dim, window = fields.size("head_dim"), fields.size("sliding_window")
    index_dim, topk = fields.size("index_head_dim"), fields.size("index_topk")
    fields.check("CSA and HCA")
    natives = {"kv": "v4_fp8_584", "window": "v4_fp8_584", "index": "index_mxfp4_68"}
    return _compressed(fields, "v4_hybrid", v4_layers(kinds[:layers], dim, window, index_dim, topk), natives)


def _v41(fields: _Fields) -> Model:
    layers, ratios = fields.size("num_hidden_layers"), fields.sizes("compress_ratios")
    dim, window = fields.size("head_dim"), fields.size("sliding_window")
    index_dim, topk = fields.size("index_head_dim"), fields.size("index_topk")
    kv_sources, index_sources = fields.sizes("kv_source_layer_ids"), fields.sizes("index_source_layer_ids")
    fields.check("CSA2")
    if len(ratios) < layers:
        raise ArgumentError(
            f"compress_ratios of {fields.name} has {len(ratios)} entries; it must have one for each of the {layers} "
            f"layers (draft layers may follow): fix it"
        )
    blocks, block = fields.get("candidate_topk_blocks"), fields.get("candidate_block_size")
    per_layer = v41_layers(
        ratios[:layers],
        dim,
        window,
        index_dim,
        topk,
        kv_sources,
        index_sources,
        candidate_source=fields.get("candidate_source_layer_id"),
        candidates=blocks * block if blocks and block else None,
    )
    natives = {"kv": "v41_fp4_288", "window": "v41_fp8_528", "index": "index_mxfp4_68"}
    return _compressed(fields, "v41_csa2", per_layer, natives)
