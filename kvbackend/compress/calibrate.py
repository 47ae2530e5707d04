"""Fit low-rank projections to a transformers model: run text through it, watch its projections, solve layer by layer.

Keys are watched as k_proj makes them, before RoPE: those are of low rank. After RoPE they are not, so that the same
rank loses far more; it can be asked for (`rope="post"`), and is then told with its measured error.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..arrays import need, one_of
from ..errors import ArgumentError
from ..profile import write_whole
from . import lowrank
from .lowrank import Projection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHODS = ("query_weighted", "pca", "whitened", "weight_svd")
SCHEMA = "kvbackend-lowrank/1"
PROBE_TOKENS = 8  # of the first text, to see that the model caches what its hooks show
MAX_ANGLES = 256  # positions that stand for all where an average over positions is taken

Text = str | Tensor | Iterable[str | Tensor | Sequence[int]]


class PostRopeWarning(UserWarning):
    """Keys are compressed after RoPE, where they are not of low rank."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """The projection of one layer's keys or values, and what it loses of the text that it was measured on.

    pair           the projection
    error          [Hk] ||x - x down up|| / ||x|| of the keys or values
    logit_error    [Hk] the same of the logits q.k with every query at every key, for keys; before RoPE they are
                   averaged over the positions that a key may have
    """

    pair: Projection
    error: Tensor
    logit_error: Tensor | None = None

    @property
    def rank(self) -> int:
        """Dims that are stored for each head."""
        return self.pair.rank


@dataclass(frozen=True, eq=False)
class Calibration:
    """Projections of all layers, with their errors; made by `calibrate`, kept by `save` and `load`.

    keys, values   one for each layer; empty where they are not compressed
    about          what they were fitted to: method, rope ("pre" or "post"), model, tokens, held_out_tokens,
                   measured_on ("calibration" or "held out"), kv_heads, num_heads, head_dim, num_layers
    """

    keys: tuple[Fitted, ...]
    values: tuple[Fitted, ...]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def key_ranks(self) -> list[int]:
        """The rank of each layer's keys; head_dim where they are not compressed."""
        return [fitted.rank for fitted in self.keys] or [self.about["head_dim"]] * self.about["num_layers"]

    @property
    def value_ranks(self) -> list[int]:
        """The rank of each layer's values; head_dim where they are not compressed."""
        return [fitted.rank for fitted in self.values] or [self.about["head_dim"]] * self.about["num_layers"]

    def bytes_per_token(self, element_bytes: float = 2) -> float:
        """Bytes that a token's keys and values take over all layers."""
        return (sum(self.key_ranks) + sum(self.value_ranks)) * self.about["kv_heads"] * element_bytes

    @property
    def ratio(self) -> float:
        """How many times smaller than uncompressed keys and values."""
        return 2 * self.about["num_layers"] * self.about["head_dim"] / (sum(self.key_ranks) + sum(self.value_ranks))

    def __str__(self) -> str:
        about = self.about
        lines = [
            f"{about['method']}, {about['rope']}-RoPE keys, {self.ratio:.2f}x smaller, {about['measured_on']} text"
        ]
        for layer in range(about["num_layers"]):
            parts = []
            for name, all_fitted in (("keys", self.keys), ("values", self.values)):
                if all_fitted:
                    fitted = all_fitted[layer]
                    parts.append(f"{name} rank {fitted.rank} error {_overall(fitted.error):.4f}")
            lines.append(f"layer {layer}: " + ", ".join(parts))
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file with metadata; it appears whole or not at all."""
        from safetensors.torch import save

        tensors = {}
        for name, all_fitted in (("keys", self.keys), ("values", self.values)):
            for layer, fitted in enumerate(all_fitted):
                prefix = f"layers.{layer}.{name}"
                tensors[f"{prefix}.down"] = fitted.pair.down
                tensors[f"{prefix}.up"] = fitted.pair.up
                tensors[f"{prefix}.error"] = fitted.error
                if fitted.logit_error is not None:
                    tensors[f"{prefix}.logit_error"] = fitted.logit_error
        data = save(
            {name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
            metadata={"schema": SCHEMA, "about": json.dumps(self.about)},
        )
        write_whole(path, data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """What `save` wrote. Raises ArgumentError for a file that is not whole or not such a one."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise ArgumentError(f"{path} is no file; it must be one that Calibration.save wrote: check the path")
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except SafetensorError as error:
            raise ArgumentError(f"{path} cannot be read ({error}); it must be whole: make it again") from error
        need(
            metadata.get("schema") == SCHEMA,
            f"{path} has schema {metadata.get('schema')!r}; it must be {SCHEMA!r}: pass a file that "
            f"Calibration.save wrote",
        )
        about = json.loads(metadata["about"])
        read = [tuple(_read(tensors, name, about, path)) for name in ("keys", "values")]
        return cls(read[0], read[1], about)


def _read(tensors: dict[str, Tensor], name: str, about: dict[str, Any], path: Any) -> Iterator[Fitted]:
    if not any(f".{name}." in key for key in tensors):
        return
    kv_heads, head_dim = about["kv_heads"], about["head_dim"]
    for layer in range(about["num_layers"]):
        prefix = f"layers.{layer}.{name}"
        parts = [tensors.get(f"{prefix}.{part}") for part in ("down", "up", "error", "logit_error")]
        down, up, error, logit_error = parts
        if down is None or up is None or error is None or down.dim() != 3:
            raise ArgumentError(f"{path} lacks a part of {prefix}; every layer must be in it: make it again")
        rank = down.shape[2]
        shapes = [list(part.shape) for part in (down, up, error)]
        wanted = [[kv_heads, head_dim, rank], [kv_heads, rank, head_dim], [kv_heads]]
        need(
            shapes == wanted and rank <= head_dim,
            f"{path} holds {prefix} of shapes {shapes}; they must be {wanted} with rank at most {head_dim}: make it "
            f"again",
        )
        yield Fitted(Projection(down, up), error, logit_error)


def _overall(error: Tensor) -> float:
    """The root mean square of the heads' errors."""
    return float(error.double().square().mean().sqrt())


# ---------------------------------------------------------------------------------------------------- calibrating


def calibrate(
    model: PreTrainedModel,
    text: Text,
    tokenizer: Any = None,
    *,
    method: str = "query_weighted",
    rank: int | None = None,
    ratios: Sequence[float] | None = None,
    bytes_per_token: float | None = None,
    energy: float | None = None,
    compress: str = "kv",
    rope: str = "pre",
    held_out: Text | None = None,
    max_length: int = 1024,
    element_bytes: float = 2,
    multiple: int = lowrank.MULTIPLE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Fit a low-rank projection to the keys and values of every layer and kv head of a model.

    model             a transformers decoder whose attention has q_proj, k_proj, v_proj and o_proj and turns keys by
                      RoPE (Llama, Mistral, Qwen2 and the like); it is not changed
    text              strings (with `tokenizer`), or token ids without padding: [T] or [B, T], one tensor or several
    method            "query_weighted": best for the logits, keys weighted by their queries (values: as "pca"); "pca":
                      best for the keys and values; "whitened": the same by way of the weights (Palu); "weight_svd":
                      from the weights alone, the text only measures
    rank, ratios, bytes_per_token, energy   exactly one of them. One rank for all; a list of ratios, first layer to
                      last (`ranks_from_ratios`); the bytes of a token over all layers, keys and values, where
                      `element_bytes` is the size of a number (`ranks_within_bytes`); the share of energy each layer
                      keeps (`ranks_for_energy`). The last three give multiples of `multiple`
    compress          "kv", "k" or "v"
    rope              "pre": keys before RoPE, to be turned after reconstruction; "post": as a cache holds them, with a
                      PostRopeWarning that tells the error
    held_out          text that the errors are measured on; by default they are measured on `text` itself
    max_length        strings are cut into pieces of that many tokens
    progress          called with the pieces done and their number
    Returns a Calibration; its pairs are float32 on the host.
    Raises ArgumentError before anything runs for a model of another structure, fewer tokens than head_dim, weights that
    are not finite or a rank above head_dim; and when an activation is not finite, naming the layer.
    Sums are float64; "whitened" keeps one [hidden, hidden] matrix for each layer.
    Source: that of each method in kvbackend.compress.lowrank; keys before RoPE as in Palu (arXiv 2407.21118).
    """
    _need_options(
        method, compress, rope, dict(rank=rank, ratios=ratios, bytes_per_token=bytes_per_token, energy=energy)
    )
    reasons = list(unsupported(model))
    if reasons:
        raise ArgumentError(f"model {type(model).__name__} cannot be calibrated: {'; '.join(reasons)}")
    layers = [_Layer.of(module) for module in _attentions(model)]
    first = layers[0]
    if rank is not None:
        lowrank._need_rank(rank, first.head_dim)
    if ratios is not None:
        lowrank.ranks_from_ratios(ratios, len(layers), first.head_dim, multiple)
    if bytes_per_token is not None:
        least = len(layers) * first.kv_heads * min(multiple, first.head_dim) * element_bytes * len(compress)
        least += _uncompressed_bytes(compress, layers, element_bytes)
        need(
            bytes_per_token >= least,
            f"bytes_per_token is {bytes_per_token}; rank {multiple} in all layers takes {least:g}: raise it, compress "
            f"both keys and values, or store narrower numbers",
        )
    for index, layer in enumerate(layers):
        layer.need_finite_weights(index)
    pieces = _pieces("text", text, tokenizer, max_length)
    tested = _pieces("held_out", held_out, tokenizer, max_length) if held_out is not None else []
    for name, some in dict(text=pieces, held_out=tested).items():
        count = sum(piece.numel() for piece in some)
        need(
            count >= first.head_dim or (name == "held_out" and not some),
            f"{name} has {count} tokens; it must have at least head_dim = {first.head_dim}, better ten times as many, "
            f"or any rank seems to lose nothing: pass more text",
        )
    _need_vocabulary(model, [*pieces, *tested])
    _probe(model, layers, pieces[0])

    total = len(pieces) + len(tested)
    seen = _watch(model, layers, pieces, method == "whitened", lambda done: progress(done, total))
    measured = seen
    if tested:
        measured = _watch(model, layers, tested, False, lambda done: progress(len(pieces) + done, total))

    full = {}
    if "k" in compress:
        full["k"] = [_fit(method, layer.k, seen[i].keys(rope), seen[i], rope) for i, layer in enumerate(layers)]
    if "v" in compress:
        own = "pca" if method == "query_weighted" else method
        full["v"] = [_fit(own, layer.v, seen[i].v, seen[i], rope) for i, layer in enumerate(layers)]
    ranks = _ranks(full, seen, first, method, rope, rank, ratios, bytes_per_token, energy, element_bytes, multiple)

    fitted: dict[str, list[Fitted]] = {"k": [], "v": []}
    for kind, pairs in full.items():
        for i, pair in enumerate(pairs):
            cut = _cut(pair, ranks[kind][i])
            on, queries = (measured[i].keys(rope), measured[i].queries(rope)) if kind == "k" else (measured[i].v, None)
            error = lowrank.relative_error(cut, on).float()
            logit_error = None if queries is None else lowrank.relative_error(cut, on, queries).float()
            fitted[kind].append(Fitted(cut.to(torch.float32, "cpu"), error.cpu(), _host(logit_error)))
    if rope == "post" and "k" in compress:
        _warn_post(fitted["k"], measured, method, layers, seen)
    about = dict(
        method=method, rope=rope, compress=compress, model=model.config.model_type, num_layers=len(layers),
        num_heads=first.num_heads, kv_heads=first.kv_heads, head_dim=first.head_dim,
        tokens=sum(piece.numel() for piece in pieces), held_out_tokens=sum(piece.numel() for piece in tested),
        measured_on="held out" if tested else "calibration",
    )  # fmt: skip
    return Calibration(tuple(fitted["k"]), tuple(fitted["v"]), about)


def _need_options(method: str, compress: str, rope: str, policies: dict[str, Any]) -> None:
    need(method in METHODS, f"method is {method!r}; it must be {one_of(map(repr, METHODS))}: choose one")
    need(
        compress in ("kv", "k", "v"),
        f"compress is {compress!r}; it must be 'kv', 'k' or 'v': choose what is compressed",
    )
    need(
        rope in ("pre", "post"),
        f"rope is {rope!r}; it must be 'pre' or 'post': choose 'pre' unless keys are cached turned",
    )
    need(
        rope == "pre" or method in ("query_weighted", "pca") or compress == "v",
        f"method is {method!r} with rope='post'; weights make keys before RoPE only: pass rope='pre', or method "
        f"'pca' or 'query_weighted'",
    )
    given = [name for name, value in policies.items() if value is not None]
    need(
        len(given) == 1,
        f"{' and '.join(given) or 'no rank'} {'are' if len(given) > 1 else 'is'} given; ranks come from exactly one of "
        f"{one_of(policies)}: pass one of them",
    )
    energy, budget = policies["energy"], policies["bytes_per_token"]
    need(energy is None or 0 < energy <= 1, f"energy is {energy}; it must be a share in (0, 1]: 0.99 is a usual one")
    need(
        budget is None or (math.isfinite(budget) and budget > 0),
        f"bytes_per_token is {budget}; it must be a positive number: pass the bytes of a token over all layers",
    )


def _fit(method: str, weight: _Weight, moment: Tensor, seen: _Seen, rope: str) -> Projection:
    """The pair of full rank, all in one dtype and on one device."""
    if method == "query_weighted":
        return lowrank.query_weighted(moment, seen.queries(rope), moment.shape[-1])
    if method == "pca":
        return lowrank.pca(moment, moment.shape[-1])
    matrix = weight.by_head()
    most = min(matrix.shape[1:])
    if method == "whitened":
        assert seen.x is not None
        inputs = seen.x if weight.linear.bias is not None else seen.x[:-1, :-1]
        return lowrank.whitened(matrix, inputs, most)
    return lowrank.weight_svd(matrix, most)


def _cut(pair: Projection, rank: int) -> Projection:
    """The pair of that rank. Keeping all dims is done without arithmetic."""
    if rank == pair.head_dim:
        return lowrank.identity(pair.down.shape[0], rank).to(torch.float64, pair.down.device)
    return pair.truncated(min(rank, pair.rank))


def _ranks(
    full: dict[str, list[Projection]], seen: list[_Seen], first: _Layer, method: str, rope: str, rank: int | None,
    ratios: Sequence[float] | None, budget: float | None, energy: float | None, element_bytes: float, multiple: int,
) -> dict[str, list[int]]:  # fmt: skip
    """The rank of every layer, for the kinds that are compressed."""
    count = len(seen)
    if rank is not None:
        return {kind: [rank] * count for kind in full}
    if ratios is not None:
        return {kind: lowrank.ranks_from_ratios(ratios, count, first.head_dim, multiple) for kind in full}
    parts = []
    for kind, pairs in full.items():
        for pair, own in zip(pairs, seen, strict=True):
            weighted = kind == "k" and method == "query_weighted"
            moment = own.keys(rope) if kind == "k" else own.v
            kept = lowrank.energies(pair, moment, own.queries(rope) if weighted else None)
            parts.append(nn.functional.pad(kept, (0, first.head_dim - kept.shape[1])))
    if energy is not None:
        chosen = lowrank.ranks_for_energy(parts, energy, multiple)
    else:
        assert budget is not None
        budget -= _uncompressed_bytes("".join(full), [own.layer for own in seen], element_bytes)
        chosen = lowrank.ranks_within_bytes(parts, budget, element_bytes, multiple)
    return {kind: chosen[i * count : (i + 1) * count] for i, kind in enumerate(full)}


def _uncompressed_bytes(compress: str, layers: list[_Layer], element_bytes: float) -> float:
    """Bytes of a token's keys or values, where one of them is not compressed."""
    return (2 - len(compress)) * sum(layer.kv_heads * layer.head_dim for layer in layers) * element_bytes


def _warn_post(
    fitted: list[Fitted], measured: list[_Seen], method: str, layers: list[_Layer], seen: list[_Seen]
) -> None:
    """Say what compressing turned keys costs, beside what the same ranks would cost before RoPE."""
    before = []
    for layer, own, there, done in zip(layers, seen, measured, fitted, strict=True):
        pair = _cut(_fit(method, layer.k, own.keys("pre"), own, "pre"), done.rank)
        before.append(lowrank.relative_error(pair, there.keys("pre")))
    error, instead = _overall(torch.stack([done.error for done in fitted])), _overall(torch.stack(before))
    worst = max(range(len(fitted)), key=lambda i: _overall(fitted[i].error))
    warnings.warn(
        f"keys are compressed after RoPE with a relative error of {error:.3f} (layer {worst}: "
        f"{_overall(fitted[worst].error):.3f}); before RoPE the same ranks have {instead:.3f}: pass rope='pre' and "
        f"turn keys after reconstruction, unless this error is good enough",
        PostRopeWarning,
        stacklevel=3,
    )


def _host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


# ------------------------------------------------------------------------------------------------------- the text


def _pieces(name: str, text: Text, tokenizer: Any, max_length: int) -> list[Tensor]:
    """Token ids, [B, T] each."""
    need(max_length >= 1, f"max_length is {max_length}; it must be at least 1: pass the tokens of a piece")
    items: list[Any]
    if isinstance(text, str | Tensor):
        items = [text]
    else:
        items = list(text)
        if items and all(isinstance(item, int) for item in items):
            items = [items]
    pieces = []
    for item in items:
        if isinstance(item, str):
            need(
                tokenizer is not None,
                f"{name} is a string but there is no tokenizer; strings are cut into tokens by the model's own: pass "
                f"tokenizer=, or token ids",
            )
            ids = torch.tensor(tokenizer(item)["input_ids"], dtype=torch.long)
            pieces += [piece[None] for piece in ids.split(max_length) if len(piece)]
            continue
        ids = torch.as_tensor(item)
        need(
            ids.dim() in (1, 2) and not (ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool),
            f"{name} holds a {ids.dtype} tensor of shape {list(ids.shape)}; token ids must be integers, [T] or [B, T]: "
            f"pass input_ids without padding",
        )
        if ids.numel():
            pieces.append(ids.long().reshape(-1, ids.shape[-1]))
    need(pieces, f"{name} is empty; projections are fitted to real activations: pass text")
    return pieces


def _need_vocabulary(model: Any, pieces: list[Tensor]) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    low, high = min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)
    need(
        low >= 0 and high < size,
        f"text holds token ids from {low} to {high}; the model knows 0 to {size - 1}: use its own tokenizer, no "
        f"padding",
    )


# ------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class _Weight:
    """k_proj or v_proj, seen by kv heads; its bias counts as the weight of an input that is always 1."""

    linear: nn.Linear
    kv_heads: int

    def by_head(self) -> Tensor:
        """[Hk, D, h], or h + 1 where there is a bias."""
        matrix = self.linear.weight.detach().double()
        if self.linear.bias is not None:
            matrix = torch.cat((matrix, self.linear.bias.detach().double()[:, None]), 1)
        return matrix.unflatten(0, (self.kv_heads, -1))


@dataclass(frozen=True)
class _Layer:
    """One attention module, and the sizes of its heads."""

    module: Any
    head_dim: int
    num_heads: int
    kv_heads: int

    @classmethod
    def of(cls, module: Any) -> _Layer:
        dim = module.head_dim
        return cls(module, dim, module.q_proj.out_features // dim, module.k_proj.out_features // dim)

    @property
    def k(self) -> _Weight:
        return _Weight(self.module.k_proj, self.kv_heads)

    @property
    def v(self) -> _Weight:
        return _Weight(self.module.v_proj, self.kv_heads)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [B, T, heads, D] as the model's own function turns them; cos and sin [B or 1, T, rotary_dim]."""
        function = getattr(sys.modules[type(self.module).__module__], "apply_rotary_pos_emb")  # noqa: B009
        q, k = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)  # [B, heads, T, D]
        return q.transpose(1, 2), k.transpose(1, 2)

    def need_finite_weights(self, index: int) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            for parameter in getattr(self.module, name).parameters():
                need(
                    bool(parameter.isfinite().all()),
                    f"{name} of layer {index} holds NaN or infinity; a projection can be fitted to finite numbers "
                    f"only: check the checkpoint",
                )


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def _attentions(model: nn.Module) -> list[Any]:
    """The attention modules, in the order of the layers."""
    return [module for module in model.modules() if all(hasattr(module, name) for name in PROJECTIONS)]


def unsupported(model: Any) -> Iterator[str]:
    """Every reason why `calibrate` refuses a model, from its structure alone."""
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or not hasattr(model, "base_model"):
        yield f"it is a {type(model).__name__}; it must be a transformers PreTrainedModel: load it with transformers"
        return
    if getattr(model, "_kvbackend", None) is not None:
        yield "it is patched for kvbackend; its own cache must be seen: call unpatch(model) first"
    modules, wanted = _attentions(model), getattr(config, "num_hidden_layers", None)
    if not modules or len(modules) != wanted:
        yield (
            f"{len(modules)} modules have {', '.join(PROJECTIONS)}; every one of its {wanted} layers must: use a "
            f"Llama-like decoder"
        )
        return
    sizes = set()
    for module in modules:
        linears = [getattr(module, name) for name in PROJECTIONS]
        if not all(isinstance(linear, nn.Linear) and linear.weight.is_floating_point() for linear in linears):
            yield f"projections of {type(module).__name__} are no plain nn.Linear; they must be: load it unquantized"
            return
        q, k, v, o = linears
        dim = getattr(module, "head_dim", None)
        if not isinstance(dim, int) or any(linear.out_features % dim for linear in (q, k, v)):
            yield f"head_dim of {type(module).__name__} is {dim}; it must divide its projections: use another model"
            return
        if k.out_features != v.out_features or q.out_features % k.out_features or o.in_features != q.out_features:
            yield (
                f"q_proj, k_proj, v_proj and o_proj take {q.out_features}, {k.out_features}, {v.out_features} and "
                f"{o.in_features} dims; keys and values must agree and divide the queries: use a Llama-like decoder"
            )
            return
        sizes.add((dim, q.out_features, k.out_features))
        if not hasattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb"):
            yield f"{type(module).__name__} has no apply_rotary_pos_emb beside it; keys are turned by it: use another"
            return
    if len(sizes) > 1:
        yield f"its layers have different (head_dim, query, key) dims, {sorted(sizes)}; they must agree: use another"


# ------------------------------------------------------------------------------------------------------- watching


@dataclass
class _Seen:
    """Second moments of one layer, summed over the text."""

    layer: _Layer
    k: Tensor  # [Hk, D, D] before RoPE
    turned: Tensor  # [Hk, D, D] after RoPE
    v: Tensor
    q: Tensor  # [Hk, D, D] queries after RoPE, over the query heads of a kv head
    x: Tensor | None = None  # [h + 1, h + 1] inputs and a 1
    angles: tuple[Tensor, Tensor] | None = None  # cos and sin of the longest piece, [1, T, rotary_dim]
    unturned: Tensor | None = None

    @classmethod
    def nothing(cls, layer: _Layer) -> _Seen:
        device = layer.module.k_proj.weight.device
        zero = torch.zeros(layer.kv_heads, layer.head_dim, layer.head_dim, dtype=torch.float64, device=device)
        return cls(layer, zero, zero.clone(), zero.clone(), zero.clone())

    def keys(self, rope: str) -> Tensor:
        return self.k if rope == "pre" else self.turned

    def queries(self, rope: str) -> Tensor:
        """What weighs an error of keys. Before RoPE: queries turned back by a key's position, averaged over positions.

        A logit is (R_i q) . (R_j k). Its error is d_j^T (R_j^T C R_j) d_j with C the moment of turned queries, summed
        over queries; the average of R_j^T C R_j over j is what weighs d d^T where errors do not depend on j.
        """
        if rope == "post":
            return self.q
        if self.unturned is None:
            assert self.angles is not None
            cos, sin = self.angles
            chosen = torch.linspace(0, cos.shape[1] - 1, min(cos.shape[1], MAX_ANGLES), device=cos.device).long()
            eye = torch.eye(self.layer.head_dim, dtype=torch.float64, device=cos.device)
            units = eye[None, None].expand(1, len(chosen), -1, -1)  # as if each unit vector were a head
            turns = self.layer.rotate(units, units, cos[:, chosen].double(), sin[:, chosen].double())[1][
                0
            ]  # row i: R_j e_i
            self.unturned = torch.einsum("jab,hbc,jdc->had", turns, self.q, turns) / len(chosen)
        return self.unturned


@contextmanager
def _hooks(layers: list[_Layer], take: Callable[[int, dict[str, Any]], None]) -> Iterator[None]:
    """Call `take` with a layer's input, q, k, v and angles whenever its attention has run."""
    handles = []

    def watch(index: int, layer: _Layer) -> None:
        found: dict[str, Any] = {}

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.clear()
            found["angles"] = kwargs.get("position_embeddings", args[1] if len(args) > 1 else None)

        def made(name: str) -> Callable[..., None]:
            def hook(_: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
                found[name] = output.detach().unflatten(-1, (-1, layer.head_dim))  # [B, T, heads, D]
                found["x"] = args[0].detach()

            return hook

        handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
        for name in ("q", "k", "v"):
            handles.append(getattr(layer.module, f"{name}_proj").register_forward_hook(made(name)))
        handles.append(layer.module.register_forward_hook(lambda *_: take(index, dict(found))))

    try:
        for index, layer in enumerate(layers):
            watch(index, layer)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(model: Any, ids: Tensor, **options: Any) -> Any:
    """Without gradients, dropout or logits."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model.base_model(ids.to(model.get_input_embeddings().weight.device), **options)
    finally:
        model.train(training)


def _probe(model: Any, layers: list[_Layer], piece: Tensor) -> None:
    """See with a few tokens that the model's own cache holds what the hooks show, turned by RoPE."""
    shown: dict[int, dict[str, Any]] = {}
    with _hooks(layers, shown.__setitem__):
        output = _forward(model, piece[:1, :PROBE_TOKENS], use_cache=True)
    cache = output.cache if "cache" in output else output.past_key_values
    for index, layer in enumerate(layers):
        found = shown.get(index, {})
        good = found.keys() >= {"k", "v", "q"} and isinstance(found.get("angles"), tuple)
        if good:
            keys = layer.rotate(found["q"], found["k"], *found["angles"])[1].transpose(1, 2)
            cached = cache.layers[index]
            good = _same(keys, cached.keys) and _same(found["v"].transpose(1, 2), cached.values)
        need(
            good,
            f"layer {index} of {type(model).__name__} does not cache RoPE(k_proj(x)) and v_proj(x); between projection "
            f"and cache only RoPE may stand (no norm of keys, no shared or chunked keys): use a Llama-like decoder",
        )


def _same(want: Tensor, got: Tensor) -> bool:
    """Equal up to rounding, over the newest rows that a windowed cache still has; what is NaN is told later."""
    rows = min(want.shape[2], got.shape[2])
    if rows == 0 or want.shape[:2] != got.shape[:2] or want.shape[3] != got.shape[3]:
        return False
    want, got = want[:, :, -rows:].double().nan_to_num(), got[:, :, -rows:].double().nan_to_num()
    return bool((want - got).abs().max() <= 0.02 * got.abs().max().clamp(min=1e-30))


def _watch(
    model: Any, layers: list[_Layer], pieces: list[Tensor], inputs: bool, progress: Callable[[int], None]
) -> list[_Seen]:
    """Run text through the model and sum up the moments of every layer."""
    seen = [_Seen.nothing(layer) for layer in layers]

    def moment(index: int, what: str, rows: Tensor) -> Tensor:
        return lowrank.second_moment(rows.flatten(0, 1), f"{what} of layer {index}")

    def take(index: int, found: dict[str, Any]) -> None:
        own = seen[index]
        cos, sin = found["angles"]
        q, k = own.layer.rotate(found["q"].float(), found["k"].float(), cos.float(), sin.float())
        own.k += moment(index, "keys", found["k"])
        own.turned += moment(index, "keys", k)
        own.v += moment(index, "values", found["v"])
        own.q += moment(index, "queries", q.unflatten(2, (own.layer.kv_heads, -1)))
        if inputs:
            x = found["x"]
            x = moment(index, "inputs", torch.cat((x, x.new_ones(*x.shape[:-1], 1)), -1))
            own.x = x if own.x is None else own.x + x
        if own.angles is None or cos.shape[1] > own.angles[0].shape[1]:
            own.angles = cos[:1], sin[:1]

    with _hooks(layers, take):
        for done, piece in enumerate(pieces):
            _forward(model, piece, use_cache=False)
            progress(done + 1)
    return seen


__all__ = ["METHODS", "Calibration", "Fitted", "PostRopeWarning", "calibrate", "unsupported"]
