"""What kvbackend.models needs to know of transformers' sparse models: DeepSeek-V3.2 and GLM-5 (DSA), DeepSeek-V4.

Each of their attention modules gets a skeleton: our module of the same parameter names, without numbers of its own. A
call runs the skeleton with the model's live parameters, so nothing is copied and nothing goes stale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from ... import cache, formats
from ...cache import SharedKvCache, SharedKvLayer
from ...models import DeepseekV4Attention, DeepseekV32Attention, DsaConfig, SharedKvConfig

TESTED = (5, 24)  # first release line that the tests run these models with


class Family:
    """Attention modules of one model, and how they run over kvbackend's caches.

    rotary      the model's own rotary module
    modules     its attention modules, in order of layers
    skeletons   ours, on no device
    """

    def __init__(self, rotary: Any, modules: Sequence[Any]) -> None:
        self.rotary, self.modules = rotary, list(modules)
        with torch.device("meta"):
            self.skeletons = [self.skeleton(module) for module in self.modules]

    def skeleton(self, module: Any) -> nn.Module:
        """Our module of the same parameters."""
        raise NotImplementedError

    holds = ""  # what its cached rows are, as records say it

    def new_pages(
        self, batch: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, kv_format: str
    ) -> Any:
        """A cache for that many rows, and as many forks of them; kv_format "auto", or a record that holds the rows."""
        raise NotImplementedError

    def block_size(self, wanted: int) -> int:
        """The tokens of a block: those that are wanted, or the next number that the model allows."""
        return wanted

    def begin(self, pages: Any, rows: Sequence[int], counts: Sequence[int]) -> Any:
        """Make room for a forward's tokens; what its layers want to know of them."""
        raise NotImplementedError

    def run(self, index: int, hidden: Tensor, pages: Any, batch: Any, tables: Tables, selected: Any) -> tuple[Any, Any]:
        """Layer `index` on tokens [T, hidden_size]: its result, and the selection it hands on."""
        raise NotImplementedError

    def call(self, index: int, *args: Any) -> Any:
        """The skeleton with the model's parameters as they are now."""
        return functional_call(self.skeletons[index], dict(self.modules[index].named_parameters()), args)


class Tables:
    """cos and sin of every position, by the frequencies of the model's own rotary module; longer when it must be."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary
        self._tables: dict[str, Tensor] = {}

    def get(self, prefix: str, length: int, device: torch.device) -> Tensor:
        """[P, rotary_dim] float32 with P at least `length`; prefix is what the rotary module's names start with."""
        table = self._tables.get(prefix)
        if table is None or len(table) < length or table.device != device:
            count = max(256, 1 << (length - 1).bit_length())
            frequencies = getattr(self.rotary, f"{prefix}inv_freq").double().cpu()
            angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies
            scaling = getattr(self.rotary, f"{prefix}attention_scaling")
            table = (torch.cat((angles.cos(), angles.sin()), -1) * scaling).float().to(device)
            self._tables[prefix] = table
        return table


class DsaFamily(Family):
    """DeepSeek-V3.2 and GLM-5."""

    def skeleton(self, module: Any) -> nn.Module:
        """Our module of the same parameters."""
        return DeepseekV32Attention(self._config(module), module.indexer is not None)

    @staticmethod
    def _config(module: Any) -> DsaConfig:
        config = module.config
        return DsaConfig(
            module.scaling, config.hidden_size, module.num_heads, module.q_lora_rank, module.kv_lora_rank,
            module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim, config.index_n_heads,
            config.index_head_dim, config.index_topk, config.model_type == "glm_moe_dsa",
            module.q_a_layernorm.variance_epsilon,
        )  # fmt: skip

    holds = "mla"

    def new_pages(
        self, batch: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, kv_format: str
    ) -> Any:
        """A PagedCache of DsaLayers."""
        made = dict(index_format=index_format(kv_format), latent_format=kv_format)
        layers = [self._config(module).layer(module.indexer is not None, **made) for module in self.modules]
        return cache.PagedCache(layers, num_blocks, block_size, dtype, device)

    def begin(self, pages: Any, rows: Sequence[int], counts: Sequence[int]) -> Any:
        """Positions, slots and the batch."""
        starts = [pages.length(row) for row in rows]
        slots = pages.append_batch(rows, counts)
        spans = (range(start, start + count) for start, count in zip(starts, counts, strict=True))
        positions = [position for span in spans for position in span]
        return torch.tensor(positions, device=slots.device), slots, pages.batch(rows, counts)

    def run(self, index: int, hidden: Tensor, pages: Any, batch: Any, tables: Tables, selected: Any) -> tuple[Any, Any]:
        """Layer `index` on tokens [T, hidden_size]: its result, and the selection it hands on."""
        positions, slots, known = batch
        cos_sin = tables.get("", known["block_table"].shape[1] * pages.block_size, hidden.device)
        return self.call(index, hidden, positions, cos_sin, pages.layers[index], slots, known, selected)


class V4Family(Family):
    """DeepSeek-V4."""

    def skeleton(self, module: Any) -> nn.Module:
        """Our module of the same parameters."""
        config = module.config
        sizes = SharedKvConfig(
            config.hidden_size, module.num_heads, module.head_dim, config.qk_rope_head_dim, config.q_lora_rank,
            config.o_groups, config.o_lora_rank, config.index_n_heads, config.index_head_dim, config.index_topk,
            config.rms_norm_eps,
        )  # fmt: skip
        return DeepseekV4Attention(sizes, self._layer(module))

    @staticmethod
    def _layer(module: Any) -> SharedKvLayer:
        kind, config = module.layer_type, module.config
        if kind == "sliding_attention":
            return SharedKvLayer()
        ratio = config.compress_rates[kind]
        if kind == "compressed_sparse_attention":
            return SharedKvLayer(ratio, True, config.index_head_dim, True)
        return SharedKvLayer(ratio)

    def block_size(self, wanted: int) -> int:
        """A multiple of every compression rate."""
        step = math.lcm(*(self._layer(module).compress_ratio or 1 for module in self.modules))
        return -(-wanted // step) * step

    holds = "shared_kv"

    def new_pages(
        self, batch: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, kv_format: str
    ) -> Any:
        """A SharedKvCache; a beam search forks all rows before it frees the old ones."""
        layers, config = [self._layer(module) for module in self.modules], self.modules[0].config
        return SharedKvCache(
            layers, num_blocks, block_size, 2 * batch, dtype, device, config.head_dim, config.sliding_window,
            window_format=kv_format, kv_format=kv_format, index_format=index_format(kv_format),
        )  # fmt: skip

    def begin(self, pages: Any, rows: Sequence[int], counts: Sequence[int]) -> Any:
        """The batch."""
        pages.append_batch(rows, counts)
        return pages.batch(rows, counts)

    def run(self, index: int, hidden: Tensor, pages: Any, batch: Any, tables: Tables, selected: Any) -> tuple[Any, Any]:
        """Layer `index` on tokens [T, hidden_size]: its result, and no selection."""
        prefix = f"{self.modules[index].rope_layer_type}_"
        length = max(batch.block_table.shape[1] * pages.sizes.block_size, 1)
        cos_sin = tables.get(prefix, length, hidden.device)
        return self.call(index, hidden, cos_sin, pages.layers[index], batch), None


def index_format(kv_format: str) -> str:
    """How the index keys beside rows in this format are stored."""
    return "auto" if kv_format == "auto" else formats.record(kv_format).index or "auto"


FAMILIES: dict[str, type[Family]] = {
    "deepseek_v32": DsaFamily,
    "glm_moe_dsa": DsaFamily,
    "deepseek_v4": V4Family,
}


def family_of(model: Any) -> Family:
    """All attention modules of a model of one of these families."""
    decoder = model.base_model
    return FAMILIES[model.config.model_type](decoder.rotary_emb, [layer.self_attn for layer in decoder.layers])


def unsupported(model: Any) -> Iterator[str]:
    """Why a model of one of these families cannot run, besides what concerns every model."""
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < TESTED:
        first = ".".join(map(str, TESTED))
        yield f"transformers is {transformers.__version__}; sparse models are tested from {first} on: upgrade"
    for name, kind in _rope_types(model.config):
        if kind not in ("default", "linear", "yarn", "llama3"):
            yield (
                f"its RoPE{name} is {kind}, whose frequencies change with the length of the text; cached rows keep "
                f"theirs: use a fixed one"
            )
    if getattr(model.config, "attention_bias", False):
        yield "its attention has biases; these layers have none: use a model with attention_bias False"
    weights = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if any(dtype.itemsize < 2 for dtype in weights):
        yield "its weights are quantized; its attention runs with plain ones: load it unquantized"


def _rope_types(config: Any) -> Iterator[tuple[str, str]]:
    parameters = config.rope_parameters
    if "rope_type" in parameters:
        yield "", parameters["rope_type"]
    for name, value in parameters.items():
        if isinstance(value, dict):
            yield f" ({name})", value.get("rope_type", "default")
