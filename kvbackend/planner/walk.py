"""The what-if walk: MHA -> GQA -> MLA -> quantize -> sparse -> evict, one step at a time, on one model's layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ArgumentError
from .accounting import Cache
from .schemes import parse
from .shapes import Layer, Model, dsa_layers, heads_layers, mla_layers

# The shapes that the steps take where the model has no such part: GQA-8 is common, the rest is DeepSeek-V3.2's.
_GQA_HEADS, _HEAD_DIM, _LATENT, _ROPE, _INDEX_DIM, _TOPK = 8, 128, 512, 64, 128, 2048
_KEEP = 4096


@dataclass(frozen=True)
class Step:
    """One step: what was changed, who can change it ("training" or "serving"), and the cache that results."""

    name: str
    change: str
    needs: str
    cache: Cache


def walk(model: Model, keep: int = _KEEP) -> list[Step]:
    """The steps for a model of the same depth and query heads as `model`; the last step is the model as it is.

    Only the last is the model itself; the others say what its cache would cost with another attention, so a step that
    needs training is no setting of a serving engine.
    """
    if model.query_heads is None:
        raise ArgumentError(
            f"the number of attention heads of {model.name} is unknown; the walk starts from them: give --heads, or a "
            f"config with num_attention_heads"
        )
    depth, heads = len(model.layers), model.query_heads
    key_dim, value_dim = model.key_dim or _HEAD_DIM, model.value_dim or _HEAD_DIM
    groups = min(_GQA_HEADS, heads)

    def step(name: str, change: str, needs: str, layers: tuple[Layer, ...], scheme: str, index: str = "bf16") -> Step:
        shape = replace(model, name=name, attention=name, layers=layers, native={"kv": "bf16", "index": index})
        return Step(name, change, needs, Cache(shape, parse(scheme), 64))

    mla = mla_layers(depth, _LATENT, _ROPE)
    dsa = dsa_layers(depth, _LATENT, _ROPE, _INDEX_DIM, _TOPK)
    steps = [
        step("MHA", f"{heads} KV heads x ({key_dim} + {value_dim}), bf16", "training",
             heads_layers(depth, heads, key_dim, value_dim), "bf16"),
        step(f"GQA-{groups}", f"{groups} KV heads x (128 + 128)", "training",
             heads_layers(depth, groups, _HEAD_DIM, _HEAD_DIM), "bf16"),
        step("MLA", f"one row of {_LATENT} + {_ROPE}", "training", mla, "bf16"),
        step("quantize", "FP8 records of 656 B", "serving", mla, "v32_fp8_656"),
        step("sparse", f"index keys of 132 B, {_TOPK} rows read", "training", dsa, "v32_fp8_656", "index_fp8_132"),
        step("evict", f"{keep} tokens kept", "serving", dsa, f"v32_fp8_656,keep={keep}", "index_fp8_132"),
    ]  # fmt: skip
    own = Cache(model, parse("native"), model.block_size)
    return [*steps, Step(model.name, f"the model itself: {model.attention}, native formats", "nothing", own)]
