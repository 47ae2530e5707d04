"""A scheme: how a cache is compressed, written as one string, such as "int4:64,recent=128,keep=4096".

The string is a format, then settings. `+` joins the format of K and V (or of the one row) with that of index keys, `/`
gives K and V different formats: "int8/int4:32", "v4_fp8_584+index_fp8_132". The planner counts a scheme, `kvbackend
run` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from typing import Any

from .. import eviction, formats
from ..errors import ArgumentError
from .shapes import Model, Rows

# Settings of a scheme, each with what it does: the one list behind the parser, its messages and the command's help.
SETTINGS = {
    "rank": "project K and V of every head to this many dims (low rank), or K/V to different ones, such as 32/64",
    "ratios": "low rank per layer: dims divided by each ratio, such as 1/1/2/2/4/4/4/4, stretched over the layers",
    "keep": "tokens that eviction keeps per sequence, as a number or as a share such as 25%",
    "evict": "the same with its policy, POLICY:KEEP[:NAME=VALUE...], such as snapkv:25% or h2o:512:summary=8",
    "recent": "last tokens kept in bf16",
    "sinks": "first tokens kept in bf16",
    "topk": "tokens that a query attends to besides first and recent ones (sparse attention; all are stored), or a "
    "list such as 512/256, stretched over the layers",
    "reselect": "decode steps that one choice of topk serves; 0 is all of them",
    "scales": "amax: static scales from the largest numbers of a calibration text, not 1 (for running; not counted)",
    "window": "format of the window rows of compressed attention (DeepSeek-V4 and V4.1)",
}

# Policies of `evict`. NAMEs are their arguments, and the two below.
POLICIES: dict[str, type[eviction.Policy]] = {
    "window": eviction.SlidingWindow,
    "streaming": eviction.StreamingLLM,
    "h2o": eviction.H2O,
    "tova": eviction.TOVA,
    "snapkv": eviction.SnapKV,
    "pyramidkv": eviction.PyramidKV,
    "l2norm": eviction.L2Norm,
}
ROWS_OF_BUDGET = {"summary": "summary_slots", "slack": "slack"}  # arguments of kvbackend.compress.EvictingCache

# What the last and first tokens are kept in, and the groups that KIVI leaves open.
FULL_PRECISION = "bf16"


@dataclass(frozen=True)
class Eviction:
    """A policy, the tokens or the share that it keeps, and its settings as they were written."""

    policy: str
    keep: int | Fraction
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """`evict`, `summary_slots` and `slack` of a PagedCache. Raises ArgumentError for what a policy cannot have."""
        made = POLICIES[self.policy]
        known = {field.name: field.default for field in fields(made) if field.default is not MISSING}
        policy: dict[str, Any] = {}
        rows: dict[str, int] = {}
        for name, given in self.settings:
            if name in ROWS_OF_BUDGET:
                rows[ROWS_OF_BUDGET[name]] = _number(name, given)
            elif name in known:
                policy[name] = given if isinstance(known[name], str) else _number(name, given)
                if isinstance(known[name], bool):
                    policy[name] = bool(policy[name])
            else:
                raise ArgumentError(
                    f"evict has {name}={given}; {self.policy} takes {', '.join([*known, *ROWS_OF_BUDGET])}: choose "
                    f"among these"
                )
        chosen = made(float(self.keep) if isinstance(self.keep, Fraction) else self.keep, **policy)
        if isinstance(self.keep, int):
            chosen.need_room(self.keep, rows.get("summary_slots", 0))
        return {"evict": chosen, **rows}


@dataclass(frozen=True)
class Scheme:
    """How the cache is stored: formats by name, and what is left out. `name` is the string that it came from."""

    name: str
    key: str = "native"
    value: str | None = None
    index: str | None = None
    window: str | None = None
    rank: int | None = None
    value_rank: int | None = None
    ratios: tuple[int, ...] = ()
    keep: int | Fraction | None = None
    evict: Eviction | None = None
    topk: tuple[int, ...] = ()
    reselect: int = 1
    scales: str | None = None
    recent: int = 0
    sinks: int = 0
    by_layer: tuple[tuple[int, int, str], ...] = field(default=())

    @property
    def policy(self) -> eviction.Policy | None:
        """What evicts, if it is said."""
        return None if self.evict is None else self.evict.options["evict"]

    def formats_of(self, model: Model, layer: int, rows: Rows) -> tuple[str, str]:
        """Names of the formats of K and V (equal unless rows hold heads) for `rows` of one layer of a model."""
        key, value = self.key, self.value or self.key
        for first, last, name in self.by_layer:
            if first <= layer <= last:
                key = value = name
        native = model.native
        if rows.role == "index":
            return (self._companion(model, key, self.index),) * 2
        if rows.role == "window":
            return (self.window or self._window(model, key),) * 2
        return _or_native(key, native["kv"]), _or_native(value, native["kv"])

    def _window(self, model: Model, key: str) -> str:
        """Window rows are stored like the others, except in 4 bits: only compressed rows have that."""
        kept_native = key in ("native", model.native["kv"]) or key.startswith("v41_fp4_288")
        return model.native["window"] if kept_native else key

    def _companion(self, model: Model, key: str, asked: str | None) -> str:
        """Index keys: as asked; native with the native rows; with a record, what its engines use; else as the rows.

        A DSA indexer (DeepSeek-V3.2, GLM-5) was trained with FP8 keys, whatever the rows are stored in.
        """
        native = model.native["index"]
        if asked or key in ("native", model.native["kv"]):
            return _or_native(asked or native, native)
        if key in formats.record_names():
            return formats.record(key).index or native
        return key if model.compressed else native


def _or_native(name: str, native: str) -> str:
    return native if name == "native" else name


def parse(text: str) -> Scheme:
    """The scheme that a string describes. Raises ArgumentError for unknown formats, settings and values."""
    head, *settings = [part.strip() for part in text.split(",")]
    head = "native" + head[4:] if re.match(r"auto($|\W)", head) else head
    rows, plus, index = head.partition("+")
    key, slash, value = rows.partition("/")
    if not key:
        raise ArgumentError(f"the scheme is {text!r}; it starts with a format: write native or one of {_known()}")
    for name in (key, *([value] if slash else []), *([index] if plus else [])):
        _check_format(name)
    found: dict[str, object] = {"key": key, "value": value or None, "index": index or None}
    by_layer = []
    names = [setting.partition("=")[0].strip() for setting in settings]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ArgumentError(f"the scheme {text!r} sets {twice[0]} twice; a setting has one value: leave one out")
    for setting in settings:
        name, equals, given = (part.strip() for part in setting.partition("="))
        if not equals or not given:
            raise ArgumentError(f"the scheme {text!r} has {setting!r}; a setting is NAME=VALUE: write {_settings()}")
        if span := re.fullmatch(r"(\d+)(?:-(\d+))?", name):
            _check_format(given)
            if span[2] and int(span[2]) < int(span[1]):
                raise ArgumentError(
                    f"the scheme {text!r} names layers {name}; a range goes from its first to its last layer: write "
                    f"{span[2]}-{span[1]}"
                )
            by_layer.append((int(span[1]), int(span[2] or span[1]), given))
        elif name == "evict":
            found["evict"] = evict = parse_eviction(given)
            found["keep"] = evict.keep
        elif name == "rank":
            key_rank, slash, value_rank = given.partition("/")
            found["rank"] = _whole(name, key_rank, 1)
            found["value_rank"] = _whole(name, value_rank, 1) if slash else None
        elif name in SETTINGS:
            found[name] = _value(name, given)
        else:
            raise ArgumentError(f"the scheme {text!r} has {name!r}; settings are {_settings()}: choose one of these")
    if "rank" in found and "ratios" in found:
        raise ArgumentError(f"the scheme {text!r} has rank and ratios; both set the rank of a layer: give one of them")
    if "reselect" in found and "topk" not in found:
        raise ArgumentError(f"the scheme {text!r} has reselect without topk; it says how often topk chooses: add topk")
    if "scales" in found and ("rank" in found or "ratios" in found):
        raise ArgumentError(
            f"the scheme {text!r} has scales=amax with a rank; scales are fitted to keys and values as a model makes "
            f"them: leave scales out"
        )
    if "evict" in found and any(setting.startswith("keep") for setting in settings):
        raise ArgumentError(f"the scheme {text!r} has keep and evict; both say how many tokens stay: give one of them")
    scheme = Scheme(text, by_layer=tuple(by_layer), **found)  # type: ignore[arg-type]
    stored = rows, *(name for _, _, name in by_layer)
    need_compatible(
        kv_formats=stored,
        evict=scheme.policy,
        kept=bool(scheme.recent or scheme.sinks),
        sparse=bool(scheme.topk),
        low_rank=bool(scheme.rank or scheme.ratios),
        alike=len(set(stored)) == 1 and len(set(scheme.ratios)) < 2 and not scheme.scales,
    )
    return scheme


def need_compatible(
    *,
    kv_formats: Iterable[str],
    evict: eviction.Policy | None,
    kept: bool,
    sparse: bool,
    low_rank: bool,
    alike: bool,
) -> None:
    """Raise ArgumentError for ways to compress that exclude each other: a scheme's, or a cache's options.

    kv_formats   those that layers have
    kept         some tokens stay in full precision
    alike        all layers have the same format, rank and scales
    """
    ways = {"evict": evict is not None, "sparse": sparse, "low_rank": low_rank}
    for name in ("evict", "sparse"):
        if ways[name] and kept:
            raise ArgumentError(
                f"{name} is given with keep_recent or keep_sinks; rows that move would leave their full-precision "
                f"copies behind, and chosen ones are read in one place: give one of the two (policies, and what is "
                f"chosen, have recent tokens and sinks of their own)"
            )
        for kv_format in kv_formats:
            if ways[name] and is_kivi(kv_format.partition("/")[0]):
                raise ArgumentError(
                    f"{name} is given with kv_format {kv_format!r}, whose keys share scales across tokens; single "
                    f"tokens are moved, or read: choose a format with scales per token, such as fp4_e2m1 or int8"
                )
    for name in ("evict", "low_rank"):
        if sparse and ways[name]:
            raise ArgumentError(
                f"sparse is given with {name}; tokens are chosen among rows as the model made them, all of them: give "
                f"one of the two"
            )
    if evict is not None and low_rank and not (evict.by_position or evict.query_dependent):
        raise ArgumentError(
            f"evict is {evict.name}, which chooses by keys, and low_rank keeps latent rows in their place: use a "
            f"policy by position or by attention, or leave low_rank out"
        )
    if evict is not None and not alike:
        need_one_budget(evict)


def need_one_budget(policy: eviction.Policy) -> None:
    """Raise ArgumentError for a policy that layers of different formats, ranks or scales cannot have."""
    if policy.by_layer:
        raise ArgumentError(
            f"{policy.name} gives layers budgets of their own over one pool; ranks, formats and scales must then be "
            f"the same in all layers: pass one of each, or a policy with one budget"
        )


def need_layers(scheme: Scheme, num_layers: int) -> None:
    """Raise ArgumentError for a scheme that names layers which a model of so many does not have, or lists that do not
    stretch over them."""
    for first, last, _ in scheme.by_layer:
        if not first <= last < num_layers:
            raise ArgumentError(
                f"the scheme {scheme.name!r} names layers {first}-{last}; the model has layers 0-{num_layers - 1}: "
                f"correct the range"
            )
    for name, told in (("ratios", "ratios"), ("topk", "topk (--sparse-topk)")):
        if entries := getattr(scheme, name):
            stretched(told, entries, num_layers)


def need_runnable(scheme: Scheme) -> None:
    """Raise ArgumentError for what `plan` counts and the models that are run here cannot have."""
    if scheme.index or scheme.window:
        raise ArgumentError(
            f"the scheme {scheme.name!r} names a format of index keys or windows; the models that are run here have "
            f"none: leave + and window out"
        )
    if scheme.keep is not None and scheme.evict is None:
        raise ArgumentError(
            f"the scheme {scheme.name!r} has keep without a policy; which tokens stay must be said to run it: write "
            f"evict=snapkv:{scheme.keep}"
        )


def parse_eviction(text: str) -> Eviction:
    """POLICY:KEEP[:NAME=VALUE...], of which the policy can be made."""
    policy, *rest = text.split(":")
    if policy not in POLICIES or not rest:
        raise ArgumentError(
            f"evict is {text!r}; it must be POLICY:KEEP, POLICY one of {', '.join(POLICIES)}: write snapkv:25% or "
            f"streaming:512:sinks=4"
        )
    settings = []
    for setting in rest[1:]:
        name, equals, given = setting.partition("=")
        if not equals or not given:
            raise ArgumentError(f"evict is {text!r} with {setting!r}; after KEEP come NAME=VALUE: write summary=8")
        settings.append((name, given))
    keep = _value("keep", rest[0])
    assert isinstance(keep, int | Fraction)
    found = Eviction(policy, keep, tuple(settings))
    _ = found.options  # raises where it cannot be made: whoever reads a scheme refuses the same
    return found


def _number(name: str, given: str) -> int:
    if not given.isdigit():
        raise ArgumentError(f"{name} is {given!r} in evict; it must be a whole number (0 and 1 for no and yes): fix it")
    return int(given)


def _settings() -> str:
    return ", ".join([*SETTINGS, "FIRST-LAST (layers)"])


def _known() -> str:
    return ", ".join((*formats.names(), *formats.record_names()))


def _check_format(name: str) -> None:
    if name == "native" or name in formats.record_names():
        return
    if name.partition(":")[0] not in formats.names():
        raise ArgumentError(f"kv_format is {name!r}; it must be native or one of {_known()}: choose one of these")
    formats.get(name)


def _value(name: str, given: str) -> object:
    if name == "window":
        _check_format(given)
        return given
    if name == "scales":
        if given != "amax":
            raise ArgumentError(
                f"scales is {given!r}; it can be amax, and is 1 where it is left out: write scales=amax"
            )
        return given
    if name in ("ratios", "topk"):
        return tuple(_whole(name, part, 1) for part in given.split("/"))
    if name == "keep" and not given.isdigit():
        try:
            share = Fraction(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not 0 < share <= 1:
            raise ArgumentError(f"keep is {given!r}; it must be tokens (4096) or a share up to 1 (0.25, 25%): fix it")
        return share
    return _whole(name, given, 0 if name in ("recent", "sinks", "reselect") else 1)


def _whole(name: str, given: str, least: int) -> int:
    if not given.isdigit() or int(given) < least:
        raise ArgumentError(f"{name} is {given!r}; it must be a whole number from {least} on: fix it")
    return int(given)


def is_kivi(name: str) -> bool:
    """True for a format whose key scales span tokens."""
    return name not in (*formats.record_names(), "native", "auto") and formats.get(name).granularity == "kivi"


def stretched(name: str, entries: tuple[int, ...], num_layers: int) -> list[int]:
    """A list of a setting as one entry for each layer, each for as many in order."""
    if num_layers % len(entries):
        raise ArgumentError(
            f"{name} has {len(entries)} entries; the number of entries must divide the {num_layers} layers: give as "
            f"many as layers, or a divisor"
        )
    return [entry for entry in entries for _ in range(num_layers // len(entries))]


def ranks(scheme: Scheme, num_layers: int, dim: int, value: bool = False) -> list[int]:
    """The rank of each layer for keys, or values, of `dim` numbers; `dim` itself where nothing is projected.

    A ratio list is stretched over the layers, each entry for as many in order; the rank is dim / ratio rounded to a
    multiple of 16, and 16 at least.
    """
    rank = scheme.value_rank if value and scheme.value_rank else scheme.rank
    if rank is not None:
        if rank > dim:
            raise ArgumentError(f"rank is {rank}; a head has {dim} dims: choose a rank up to {dim}")
        return [rank] * num_layers
    if not scheme.ratios:
        return [dim] * num_layers
    by_layer = stretched("ratios", scheme.ratios, num_layers)
    return [dim if ratio == 1 else min(dim, max(16, round(dim / ratio / 16) * 16)) for ratio in by_layer]
