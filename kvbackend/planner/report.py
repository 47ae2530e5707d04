"""A plan as a document for programs and as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, TextIO

from .. import __version__
from .accounting import number
from .memory import GIB
from .planning import Plan
from .walk import Step

SCHEMA = "kvbackend-plan/1"


def document(plans: Sequence[Plan], steps: Sequence[Step] = ()) -> dict[str, Any]:
    """One JSON document: the plan itself, or several under `schemes`; the steps of a walk under `walk`."""
    head = {"schema": SCHEMA, "version": __version__}
    if len(plans) == 1:
        found = head | _plan_fields(plans[0])
    else:
        model = plans[0].model
        found = head | {
            "model": model.name,
            "attention": model.attention,
            "schemes": [_plan_fields(p) for p in plans],
        }
    if steps:
        found["walk"] = [_step_fields(step, plans[0].context) for step in steps]
    return found


def _plan_fields(made: Plan) -> dict[str, Any]:
    return {
        "model": made.model.name,
        "attention": made.model.attention,
        "scheme": made.scheme.name,
        "bytes_per_token": _json(made.bytes_per_token),
        "allocated_bytes_per_token": _json(made.allocated_bytes_per_token),
        "fixed_bytes_per_sequence": _json(made.fixed_bytes_per_sequence),
        "formula": made.formula(),
        "fixed_formula": made.cache.formula_of_fixed(),
        "context": made.context,
        "sequences": made.sequences,
        "block_size": made.cache.block_size,
        "sequence_bytes": made.bytes_at(made.context),
        "allocated_sequence_bytes": made.allocated_bytes_at(made.context),
        "read_bytes_per_step": made.cache.read_bytes_at(made.context),
        "max_sequences": made.max_sequences,
        "max_context": made.max_context,
        "max_context_by_memory": made.max_context_by_memory,
        "host_sequences": made.host_sequences,
        "fits": made.fits,
        "shortfall_bytes": made.shortfall_at(made.context),
        "decode_step_bound_us": made.decode_bound_us,
        "device": _device_fields(made),
        "parallel": {
            "tensor": made.parallel.tensor,
            "pipeline": made.parallel.pipeline,
            "expert": made.parallel.expert,
            "devices": made.parallel.devices,
            "device_bytes_per_token": _json(made.device_bytes_per_token),
            "replicated_bytes_per_token": _json(made.replicated_bytes_per_token),
        },
        "vllm": made.vllm,
        "layers": [
            {"index": layer.index, "kind": layer.layer.kind, "bytes_per_token": _json(layer.per_token)}
            for layer in made.cache.layers
        ],
        "notes": list(made.notes),
    }


def _device_fields(made: Plan) -> dict[str, Any] | None:
    if made.device is None:
        return None
    bandwidth = made.device.bandwidth
    return {
        "name": made.device.name,
        "kind": made.device.kind,
        "memory_bytes": made.device.memory_bytes,
        "reserved_bytes": made.reserved_bytes,
        "activation_bytes": made.activation_bytes,
        "weights_bytes": max(stage.weights_bytes for stage in made.stages) if made.weights else None,
        "cache_bytes": min(stage.available_bytes for stage in made.stages),
        "bandwidth_bytes_per_s": None if bandwidth is None else _json(bandwidth),
        "source": made.device.source,
    }


def _step_fields(step: Step, context: int) -> dict[str, Any]:
    return {
        "name": step.name,
        "change": step.change,
        "needs": step.needs,
        "bytes_per_token": _json(step.cache.per_token),
        "sequence_bytes": step.cache.bytes_at(context),
        "read_bytes_per_step": step.cache.read_bytes_at(context),
    }


def _json(value: Fraction | int) -> int | float:
    value = Fraction(value)
    return value.numerator if value.denominator == 1 else float(value)


def show(made: Plan, explain: bool, out: TextIO) -> None:
    """One plan as text."""
    model = made.model
    print(f"{model.name}: {model.attention}, {len(model.layers)} layers, KV format {made.scheme.name}", file=out)
    rows = [
        ("bytes per token", number(made.bytes_per_token), "records only, whole model"),
        (
            "allocated per token",
            number(made.allocated_bytes_per_token),
            f"pages of {made.cache.block_size} tokens",
        ),
        (
            "fixed per sequence",
            number(made.fixed_bytes_per_sequence),
            "windows, states, full-precision parts",
        ),
        *((f"at {_tokens(n)}", size(made.allocated_bytes_at(n)), "one sequence") for n in _contexts(made)),
    ]
    if made.parallel.devices > 1:
        rows.append(("per token, per device", number(made.device_bytes_per_token), _spread(made)))
    table(("cache", "bytes", ""), rows, out)
    if explain:
        print(f"\n  {made.formula()}\n  {made.cache.formula_of_fixed()}", file=out)
    if made.device is not None:
        print(file=out)
        _show_memory(made, out)
    for note in made.notes:
        print(f"note: {note}", file=out)


def _spread(made: Plan) -> str:
    parallel = made.parallel
    return (
        f"{parallel.devices} devices: tensor {parallel.tensor}, pipeline {parallel.pipeline}, expert {parallel.expert}"
    )


def _contexts(made: Plan) -> list[int]:
    longest = made.model.max_context or 1 << 20
    usual = [n for n in (8 << 10, 32 << 10, 128 << 10, 1 << 20) if n <= longest]
    return sorted({*usual, made.context})


def _show_memory(made: Plan, out: TextIO) -> None:
    assert made.device is not None
    target, stage = made.device, min(made.stages, key=lambda stage: stage.available_bytes)
    reserve = (
        "kept for the system" if target.kind == "cpu" else f"margin, {made.reserved_bytes / target.memory_bytes:.0%}"
    )
    rows = [
        ("memory", size(target.memory_bytes), f"{target.name}, each"),
        ("- reserve", size(made.reserved_bytes), reserve),
        ("- activations", size(made.activation_bytes), "activations and workspaces"),
        ("- weights", size(stage.weights_bytes), made.weights.label if made.weights else "unknown: not counted"),
        (
            "= for the cache",
            size(stage.available_bytes),
            "per device",
        ),
    ]
    table(("device", "bytes", ""), rows, out)
    print(file=out)
    print(f"sequences of {_tokens(made.context)} that fit: {_or_unbounded(made.max_sequences)}", file=out)
    if made.host_bytes:
        print(f"more that wait in host memory: {made.host_sequences}", file=out)
    asked = f"{made.sequences} sequence{'s' if made.sequences > 1 else ''}"
    print(f"longest context for {asked}: {_or_unbounded(made.max_context)}{_limit(made)}", file=out)
    if made.decode_bound_us is not None:
        bound = f"{made.decode_bound_us:.0f} us at least (bandwidth only)"
        print(f"decode step of {asked} at {_tokens(made.context)}: {bound}", file=out)
    if made.vllm is not None:
        words = [f"--{key.replace('_', '-')}{'' if value is True else f' {value}'}" for key, value in _said(made.vllm)]
        print(f"vLLM: {' '.join(words)}", file=out)
    if not made.fits:
        short = made.shortfall_at(made.context)
        print(f"does not fit: a device is {size(short)} short of {asked} of {_tokens(made.context)}", file=out)


def _said(vllm: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (key, value) for key, value in vllm.items() if not (key.endswith("_size") and value == 1) and value is not False
    ]


def _limit(made: Plan) -> str:
    by_memory = made.max_context_by_memory
    bound_by_model = made.max_context is not None and (by_memory is None or by_memory > made.max_context)
    return " (the model's limit)" if bound_by_model else ""


def _or_unbounded(count: int | None) -> str:
    return "no limit" if count is None else str(count)


def show_compared(plans: Sequence[Plan], out: TextIO) -> None:
    """Several plans in one table."""
    first = plans[0]
    print(f"{first.model.name}: {first.model.attention}, one sequence at {_tokens(first.context)}", file=out)
    rows = []
    for made in plans:
        fitting = [] if made.device is None else [_or_unbounded(made.max_sequences), _or_unbounded(made.max_context)]
        total, base = made.bytes_at(made.context), first.bytes_at(first.context)
        rows.append(
            (
                made.scheme.name,
                number(made.bytes_per_token),
                number(made.fixed_bytes_per_sequence),
                size(made.allocated_bytes_at(made.context)),
                f"{base / total:.2f}x" if total else "-",
                *fitting,
            )
        )
    fits = () if first.device is None else ("sequences", "max context")
    table(("scheme", "B per token", "fixed B", "at context", "smaller", *fits), rows, out)
    for note in dict.fromkeys(note for made in plans for note in made.notes):
        print(f"note: {note}", file=out)


def show_walk(steps: Sequence[Step], context: int, out: TextIO) -> None:
    """The steps of a walk, with bytes at each."""
    print(f"\nwhat-if walk, one sequence at {_tokens(context)}", file=out)
    rows, before = [], None
    for step in steps:
        total = step.cache.bytes_at(context)
        rows.append(
            (
                step.name,
                step.change,
                step.needs,
                number(step.cache.per_token),
                size(total),
                size(step.cache.read_bytes_at(context)),
                "" if before is None else f"{total / before:.3f}x",
            )
        )
        before = total
    table(("step", "change", "needs", "B per token", "cache", "read per step", "of the step before"), rows, out)


def size(value: Fraction | int) -> str:
    """Bytes for people: 1.500 GiB."""
    value = Fraction(value)
    for unit, limit in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= limit:
            return f"{float(value / limit):.3f} {unit}"
    return f"{number(value)} B"


def _tokens(count: int) -> str:
    return f"{count >> 20}M tokens" if count % (1 << 20) == 0 else f"{count} tokens"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO) -> None:
    """A table: drawn by rich on a terminal that has it, aligned text elsewhere."""
    if out.isatty() and _draw(head, rows, out):
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join(cells).rstrip(), file=out)


def _draw(head: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        return False
    drawn = Table()
    for name in head:
        drawn.add_column(name, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    Console(file=out).print(drawn)
    return True
