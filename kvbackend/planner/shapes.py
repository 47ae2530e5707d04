"""What a model caches: per layer the rows that it keeps and the rows that one decode step reads. No formats here.

Everything is counted in *rows*: a row is what one token leaves behind in an ordinary layer, or what `tokens_per_row`
tokens leave behind in a compressed one.

Sources: DeepSeek-V2 (arXiv 2405.04434) for MLA; DeepSeek-V3.2 for the indexer; DeepSeek-V4 and V4.1 (arXiv 2609.19969)
and their published configs for CSA, HCA and CSA2; vLLM 0.33 for page sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..errors import ArgumentError

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Vector:
    """`heads` vectors of `dim` numbers each, stored per row."""

    name: str
    heads: int
    dim: int

    def on_one_of(self, devices: int) -> Vector:
        """The share of one of `devices` tensor-parallel devices: heads are split, and copied when there are too few."""
        if self.heads % devices and devices % self.heads:
            raise ArgumentError(
                f"tensor_parallel is {devices}; {self.heads} {self.name} heads can be split into or copied to "
                f"multiples only: choose a divisor or a multiple of {self.heads}"
            )
        return replace(self, heads=max(1, self.heads // devices))


@dataclass(frozen=True)
class Rows:
    """Rows of one kind that one layer keeps.

    role            "kv", "index" or "window" (a ring beside compressed rows): what a scheme gives a format to
    holds           "heads" (K and V per head), "mla", "shared_kv" or "index_key"
    vectors         what one row stores
    tokens_per_row  tokens that one row stands for
    window          rows kept at most, else None
    ring            a window is overwritten in place; otherwise whole pages are freed as it slides on
    page_rows       rows of a page where the model's engines fix it, else None: block_size / tokens_per_row
    """

    role: str
    holds: str
    vectors: tuple[Vector, ...]
    tokens_per_row: int = 1
    window: int | None = None
    ring: bool = False
    page_rows: int | None = None


@dataclass(frozen=True)
class Read:
    """Rows that one decode step of one sequence reads in one layer: all there are, or `limit` that were selected."""

    rows: Rows
    limit: int | None = None


@dataclass(frozen=True)
class Layer:
    """One attention layer. `source` is the layer whose cache it reads; `state_bytes` are fixed bytes per sequence."""

    kind: str
    keeps: tuple[Rows, ...]
    reads: tuple[Read, ...]
    source: int
    state_bytes: int = 0


@dataclass(frozen=True)
class Model:
    """A model as far as its cache is concerned, and what is known about its weights.

    attention         "mha", "gqa", "mqa", "mla", "mla+dsa", "v4_hybrid" or "v41_csa2"
    native            format per role that the model was made for
    block_size        tokens of a page, unless the caller says otherwise
    query_heads       attention heads, and key_dim, value_dim their widths without compression; None if unknown
    max_context       longest context the model was made for, None if unknown
    parameters        all, active_parameters per token, expert_parameters routed; None if unknown
    has_experts       True for a mixture of experts, also if their size is unknown
    weights_dtype     of the parameters, experts_dtype of the routed experts if another; weights_bytes if measured
    source, notes     where the numbers come from; what the reader of a config had to decide
    """

    name: str
    attention: str
    layers: tuple[Layer, ...]
    native: dict[str, str]
    block_size: int
    query_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    max_context: int | None = None
    parameters: int | None = None
    active_parameters: int | None = None
    expert_parameters: int | None = None
    has_experts: bool = False
    weights_dtype: str | None = None
    experts_dtype: str | None = None
    weights_bytes: int | None = None
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def compressed(self) -> bool:
        """True if rows stand for several tokens, or layers share them: formats and windows are fixed by training."""
        return self.attention in ("v4_hybrid", "v41_csa2")

    def on_one_of(self, devices: int) -> Model:
        """The cache of one of `devices` tensor-parallel devices."""
        if self.query_heads is not None and self.query_heads % devices:
            raise ArgumentError(
                f"tensor_parallel is {devices}; it must divide the {self.query_heads} attention heads of {self.name}: "
                f"choose one of {', '.join(str(n) for n in _divisors(self.query_heads))}"
            )

        def share(rows: Rows) -> Rows:
            return replace(rows, vectors=tuple(vector.on_one_of(devices) for vector in rows.vectors))

        layers = tuple(
            replace(
                layer,
                keeps=tuple(share(rows) for rows in layer.keeps),
                reads=tuple(replace(read, rows=share(read.rows)) for read in layer.reads),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def stages(self, count: int) -> list[range]:
        """Layers of each of `count` pipeline stages: as even as the layers that share one cache allow."""
        total = len(self.layers)
        cuts = [at for at in range(1, total) if all(layer.source >= at for layer in self.layers[at:])]
        if count - 1 > len(cuts):
            raise ArgumentError(
                f"pipeline_parallel is {count}; the {total} layers of {self.name} make {len(cuts) + 1} stages at "
                f"most, since layers that share a cache stay together: lower pipeline_parallel"
            )

        @cache
        def best(first: int, stages: int) -> tuple[range, ...]:
            if stages == 1:
                return (range(first, total),)
            later = [at for at in cuts if at > first]
            usable = later[: len(later) - (stages - 2)]
            return min(((range(first, at), *best(at, stages - 1)) for at in usable), key=_longest)

        return list(best(0, count))


def _longest(stages: Iterable[range]) -> int:
    return max(len(stage) for stage in stages)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _plain_layer(kind: str, index: int, *keeps: Rows, reads: Sequence[Read] = ()) -> Layer:
    return Layer(kind, keeps, tuple(reads) or tuple(Read(rows) for rows in keeps), index)


def heads_layers(
    num_layers: int, kv_heads: int, key_dim: int, value_dim: int, windows: Sequence[int | None] = ()
) -> tuple[Layer, ...]:
    """MHA, GQA or MQA layers; `windows` gives each layer's sliding window in tokens, None for full attention."""
    layers = []
    for index, window in enumerate(windows or [None] * num_layers):
        vectors = (Vector("key", kv_heads, key_dim), Vector("value", kv_heads, value_dim))
        kind = "sliding" if window else "full"
        layers.append(_plain_layer(kind, index, Rows("kv", "heads", vectors, window=window)))
    return tuple(layers)


def mla_layers(num_layers: int, kv_lora_rank: int, rope_dim: int) -> tuple[Layer, ...]:
    """MLA layers: one latent row and one rotary key per token, key and value in one, so no factor 2."""
    return tuple(_plain_layer("mla", index, _mla_rows(kv_lora_rank, rope_dim)) for index in range(num_layers))


def dsa_layers(
    num_layers: int,
    kv_lora_rank: int,
    rope_dim: int,
    index_dim: int,
    topk: int,
    owns_indexer: Sequence[bool] = (),
) -> tuple[Layer, ...]:
    """MLA layers that read `topk` rows, chosen with index keys; a layer without an indexer reuses the choice before."""
    rows = _mla_rows(kv_lora_rank, rope_dim)
    index_rows = Rows("index", "index_key", (Vector("index_key", 1, index_dim),))
    layers = []
    for index, owner in enumerate(owns_indexer or [True] * num_layers):
        if owner:
            reads = [Read(rows, topk), Read(index_rows)]
            layers.append(_plain_layer("dsa", index, rows, index_rows, reads=reads))
        else:
            layers.append(_plain_layer("dsa reuse", index, rows, reads=[Read(rows, topk)]))
    return tuple(layers)


def _mla_rows(kv_lora_rank: int, rope_dim: int) -> Rows:
    return Rows("kv", "mla", (Vector("latent", 1, kv_lora_rank), Vector("rope", 1, rope_dim)))


def v4_layers(
    kinds: Sequence[tuple[str, int]], dim: int, window: int, index_dim: int, topk: int, window_page: int = 64
) -> tuple[Layer, ...]:
    """DeepSeek-V4 layers, each ("swa", 0), ("csa", tokens per row) or ("hca", tokens per row).

    Every layer has a ring of `window` rows; CSA has an indexer besides. Fixed bytes hold the open groups in float32:
    `coff * m` rows of `coff * d` values and as many scores, coff 2 where groups overlap (CSA) and 1 elsewhere.
    """
    ring = _ring_rows(dim, window, window_page)
    layers = []
    for index, (kind, ratio) in enumerate(kinds):
        if kind == "swa":
            layers.append(_plain_layer(kind, index, ring))
            continue
        rows = _compressed_rows("kv", dim, ratio)
        if kind == "hca":
            state = _open_group_bytes(ratio, dim, 1)
            layers.append(Layer(kind, (ring, rows), (Read(ring), Read(rows)), index, state))
        else:
            index_rows = _compressed_rows("index", index_dim, ratio)
            reads = (Read(ring), Read(rows, topk), Read(index_rows))
            state = _open_group_bytes(ratio, dim, 2) + _open_group_bytes(ratio, index_dim, 2)
            layers.append(Layer(kind, (ring, rows, index_rows), reads, index, state))
    return tuple(layers)


def _open_group_bytes(ratio: int, dim: int, coff: int) -> int:
    return 2 * (coff * ratio) * (coff * dim) * _FLOAT32_BYTES


def v41_layers(
    ratios: Sequence[int],
    dim: int,
    window: int,
    index_dim: int,
    topk: int,
    kv_sources: Sequence[int],
    index_sources: Sequence[int],
    candidate_source: int | None = None,
    candidates: int | None = None,
    ring_rows: int = 8,
    window_page: int = 32,
) -> tuple[Layer, ...]:
    """DeepSeek-V4.1 (CSA2): only `kv_sources` own compressed rows and index keys; the other layers read theirs.

    A layer's source is the largest listed id that is not above it. `candidates` bounds the index keys that index
    sources after `candidate_source` read. Sources with ratio > 1 keep a ring of `ring_rows` open tokens in float32.
    """
    ring = _ring_rows(dim, window, window_page)
    layers = []
    for index, ratio in enumerate(ratios):
        if ratio == 0:
            layers.append(_plain_layer("swa", index, ring))
            continue
        source = max((at for at in kv_sources if at <= index), default=None)
        if source is None:
            raise ArgumentError(
                f"kv_source_layer_ids is {list(kv_sources)}; layer {index} has ratio {ratio} and needs a source at or "
                f"before it: correct kv_source_layer_ids or compress_ratios"
            )
        rows = _compressed_rows("kv", dim, ratios[source])
        index_rows = _compressed_rows("index", index_dim, ratios[source])
        reads = [Read(ring), Read(rows, topk)]
        if index in index_sources:
            narrowed = candidate_source is not None and index > candidate_source
            reads.append(Read(index_rows, candidates if narrowed else None))
        if index == source:
            state = 2 * dim * ring_rows * _FLOAT32_BYTES if ratio > 1 else 0
            layers.append(Layer("csa2 full", (ring, rows, index_rows), tuple(reads), source, state))
        else:
            kind = "csa2 reindex" if index in index_sources else "csa2 reuse"
            layers.append(Layer(kind, (ring,), tuple(reads), source))
    return tuple(layers)


def _ring_rows(dim: int, window: int, window_page: int) -> Rows:
    return Rows("window", "shared_kv", (Vector("kv", 1, dim),), 1, window, True, window_page)


def _compressed_rows(role: str, dim: int, ratio: int) -> Rows:
    holds, name = ("shared_kv", "kv") if role == "kv" else ("index_key", "index_key")
    return Rows(role, holds, (Vector(name, 1, dim),), ratio)
