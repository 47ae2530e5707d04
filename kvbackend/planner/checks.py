"""What a scheme may ask of a model: every refusal of the accounting, before anything is counted."""

from __future__ import annotations

from math import lcm

from .. import formats
from ..errors import ArgumentError
from ..eviction import StreamingLLM
from .schemes import Scheme, is_kivi, need_layers
from .shapes import Model, Rows

MOST_TOKENS = 1 << 20  # of a page


def default_block_size(model: Model, scheme: Scheme) -> int:
    """The model's usual page in tokens, raised to a multiple of the token groups that the scheme's keys need."""
    names = {scheme.key, *(name for _, _, name in scheme.by_layer)}
    groups = (formats.get(name).group or 1 for name in names if is_kivi(name))
    return lcm(model.block_size, *groups)


def check(model: Model, scheme: Scheme, block_size: int) -> None:
    """Raise ArgumentError if the model's attention cannot have what the scheme asks for."""
    if not 1 <= block_size <= MOST_TOKENS:
        raise ArgumentError(f"block_size is {block_size}; a page holds 1 to {MOST_TOKENS} tokens: pass 16, 64 or 256")
    _check_settings(model, scheme)
    for index, layer in enumerate(model.layers):
        for rows in layer.keeps:
            if rows.page_rows is None and block_size % rows.tokens_per_row:
                raise ArgumentError(
                    f"block_size is {block_size}; {model.name} has rows that stand for {rows.tokens_per_row} tokens, "
                    f"and a page holds whole rows: choose a multiple of {rows.tokens_per_row}, such as "
                    f"{model.block_size}"
                )
            key, value = scheme.formats_of(model, index, rows)
            _check_group(key, block_size)
            for name in (key, value):
                if name in formats.record_names():
                    _check_record(model, scheme, rows, name)
                else:
                    _check_format(model, scheme, rows, name)


def _check_settings(model: Model, scheme: Scheme) -> None:
    if model.compressed:
        for setting in ("rank", "ratios", "keep", "recent", "sinks"):
            if getattr(scheme, setting):
                raise ArgumentError(
                    f"the scheme {scheme.name!r} sets {setting}; the windows, ratios and selection of {model.name} are "
                    f"fixed by training ({model.attention}): choose formats only"
                )
    held = {rows.holds for layer in model.layers for rows in layer.keeps}
    if scheme.window and "window" not in {rows.role for layer in model.layers for rows in layer.keeps}:
        raise ArgumentError(
            f"the scheme {scheme.name!r} sets window; {model.name} ({model.attention}) has no window rows beside "
            f"compressed ones: leave it out"
        )
    if scheme.index and "index_key" not in held:
        raise ArgumentError(
            f"the scheme {scheme.name!r} gives index keys a format; {model.name} ({model.attention}) has no indexer: "
            f"leave out what follows the +"
        )
    if (scheme.rank or scheme.ratios) and "mla" in held:
        raise ArgumentError(
            f"the scheme {scheme.name!r} sets a rank; {model.name} already caches a trained low-rank row (MLA): choose "
            f"a format or keep instead"
        )
    if isinstance(scheme.keep, int) and scheme.keep <= scheme.recent + scheme.sinks:
        raise ArgumentError(
            f"keep is {scheme.keep}; it must exceed recent + sinks, {scheme.recent + scheme.sinks}: raise keep"
        )
    need_layers(scheme, len(model.layers))
    if scheme.topk and held != {"heads"}:
        raise ArgumentError(
            f"the scheme {scheme.name!r} sets topk, which chooses among keys of heads; {model.name} "
            f"({model.attention}) has none: leave it out (its own selection is counted)"
        )
    if scheme.evict is not None and held != {"heads"}:
        policy, slots = scheme.evict.options["evict"], scheme.evict.options.get("summary_slots")
        if not policy.by_position or slots or (isinstance(policy, StreamingLLM) and policy.positions == "cache"):
            raise ArgumentError(
                f"the scheme {scheme.name!r} evicts by {policy.name}; rows of {model.name} are latent, turned and for "
                f"all heads (MLA): write evict=window, or evict=streaming with positions=original, without summaries"
            )


def _check_record(model: Model, scheme: Scheme, rows: Rows, name: str) -> None:
    if not _fits(name, rows):
        record = formats.record(name)
        fitting = [*(other for other in formats.record_names() if _fits(other, rows)), "bf16", "fp8_e4m3"]
        raise ArgumentError(
            f"kv_format is {name!r}, a record of one {record.holds} row of {' + '.join(map(str, record.dims))}; "
            f"{rows.role} rows of {model.name} are {_held(rows)}: choose one of {', '.join(fitting)}"
        )
    if scheme.value:
        raise ArgumentError(
            f"kv_format is {scheme.name!r}; a record holds K and V in one row and has no second format: write {name!r}"
        )


def _fits(name: str, rows: Rows) -> bool:
    record = formats.record(name)
    return (record.holds, record.dims) == (rows.holds, tuple(vector.dim for vector in rows.vectors))


def _held(rows: Rows) -> str:
    return " and ".join(f"{vector.name} {vector.heads} x {vector.dim}" for vector in rows.vectors)


def _check_group(key: str, block_size: int) -> None:
    group = formats.get(key).group or 1 if is_kivi(key) else 1
    if block_size % group:
        raise ArgumentError(
            f"block_size is {block_size}; {key} scales keys over {group} tokens of a page: choose a multiple of {group}"
        )


def _check_format(model: Model, scheme: Scheme, rows: Rows, name: str) -> None:
    if rows.holds != "heads" and scheme.value:
        raise ArgumentError(
            f"kv_format is {scheme.name!r}; in {model.name} one row is key and value ({_held(rows)}): give one format"
        )
    if is_kivi(name) and rows.holds != "heads":
        raise ArgumentError(
            f"kv_format is {name!r}, which scales keys per channel and values per token; in {model.name} one row is "
            f"both ({_held(rows)}): choose fp4_e2m1, mxfp4 or nvfp4 for 4 bits"
        )
