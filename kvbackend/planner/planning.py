"""`plan`: what a cache costs, what fits into a memory, and how fast decoding can be at best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from ..errors import ArgumentError
from .accounting import Cache, number
from .checks import default_block_size
from .configs import Source, load
from .memory import (
    DEFAULT_ACTIVATIONS,
    WEIGHT_BITS,
    Device,
    Parallel,
    Weights,
    find_device,
    parse_bytes,
    parse_count,
)
from .schemes import Scheme, need_runnable, parse
from .shapes import Model

# No context is searched for beyond this.
_LONGEST_CONTEXT = 1 << 40
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, as one of its devices sees it."""

    cache: Cache
    weights_bytes: int
    weights_read: Fraction | None
    available_bytes: int

    def sequences(self, context: int) -> int | None:
        """Sequences of `context` tokens that fit; None if they cost nothing here."""
        each = self.cache.allocated_at(context)
        return max(self.available_bytes, 0) // each if each else None


@dataclass(frozen=True, repr=False)
class Plan:
    """A plan. Numbers of bytes are exact; fractions of a byte per token occur where rows stand for several tokens."""

    model: Model
    scheme: Scheme
    cache: Cache
    parallel: Parallel
    context: int
    sequences: int
    device: Device | None
    reserved_bytes: int
    activation_bytes: int
    host_bytes: int
    weights: Weights | None
    stages: tuple[Stage, ...]
    notes: tuple[str, ...]

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes by which one more token makes the whole model's cache grow: records only, one copy."""
        return self.cache.per_token

    @property
    def allocated_bytes_per_token(self) -> Fraction:
        """The same for pages, their padding included: what a pool allocates."""
        return self.cache.allocated_per_token

    @property
    def fixed_bytes_per_sequence(self) -> Fraction:
        """Bytes of a sequence beyond `bytes_per_token` x tokens: windows, states, parts in full precision."""
        return self.cache.fixed_per_sequence

    @property
    def device_bytes_per_token(self) -> Fraction:
        """Bytes per token on the device that holds most of them."""
        return max(stage.cache.per_token for stage in self.stages)

    @property
    def replicated_bytes_per_token(self) -> Fraction:
        """Bytes per token that tensor parallelism stores more than once."""
        held = self.parallel.tensor * sum((stage.cache.per_token for stage in self.stages), Fraction(0))
        return held - self.bytes_per_token

    def bytes_at(self, context: int) -> int:
        """Bytes of one sequence: records and states."""
        return self.cache.bytes_at(context)

    def allocated_bytes_at(self, context: int) -> int:
        """Bytes of one sequence: whole pages and states."""
        return self.cache.allocated_at(context)

    def sequences_at(self, context: int) -> int | None:
        """Sequences of `context` tokens that fit on all devices together; None without a memory."""
        if self.device is None:
            return None
        fitting = [count for stage in self.stages if (count := stage.sequences(context)) is not None]
        return min(fitting) * self.parallel.replicas if fitting else None

    @cached_property
    def max_sequences(self) -> int | None:
        """Sequences of the plan's context that fit."""
        return self.sequences_at(self.context)

    @cached_property
    def host_sequences(self) -> int:
        """More sequences whose pages wait in host memory."""
        each = self.parallel.tensor * sum(stage.cache.allocated_at(self.context) for stage in self.stages)
        return self.host_bytes // each if each else 0

    @cached_property
    def max_context(self) -> int | None:
        """Longest context for the plan's sequences, up to the model's own limit; None without a memory."""
        longest = self.max_context_by_memory
        if self.model.max_context is None or longest is None:
            return longest
        return min(longest, self.model.max_context)

    @cached_property
    def max_context_by_memory(self) -> int | None:
        """Longest context for the plan's sequences as far as memory goes; None without one or without an end."""
        if self.device is None or not self.shortfall_at(_LONGEST_CONTEXT):
            return None if self.device is None else self.model.max_context
        return _last(lambda context: not self.shortfall_at(context), _LONGEST_CONTEXT)

    @property
    def _sequences_of_a_copy(self) -> int:
        return -(-self.sequences // self.parallel.replicas)

    def device_bytes_at(self, context: int) -> int:
        """Bytes of the plan's sequences at a context, on the device that holds most of them."""
        return self._sequences_of_a_copy * max(stage.cache.allocated_at(context) for stage in self.stages)

    def shortfall_at(self, context: int) -> int:
        """Bytes that a device lacks for the plan's sequences at a context; 0 if they fit."""
        each = self._sequences_of_a_copy
        needed = (each * stage.cache.allocated_at(context) - stage.available_bytes for stage in self.stages)
        return max(0, *needed) if self.device is not None else 0

    @property
    def fits(self) -> bool | None:
        """Whether the plan's sequences fit at its context; None without a memory."""
        return None if self.device is None else self.shortfall_at(self.context) == 0

    @property
    def decode_bound_us(self) -> float | None:
        """Time that one decode step takes at least, from bytes and bandwidth alone; None if either is unknown."""
        if self.device is None or self.device.bandwidth is None:
            return None
        reads = [stage.weights_read for stage in self.stages]
        if None in reads:
            return None
        cached = self._sequences_of_a_copy * sum(stage.cache.read_bytes_at(self.context) for stage in self.stages)
        return float((sum(filter(None, reads), Fraction(0)) + cached) / self.device.bandwidth * 10**6)

    @property
    def vllm(self) -> dict[str, Any] | None:
        """The plan in vLLM's words; None without a memory or if nothing fits."""
        if self.device is None or not self.max_sequences:
            return None
        usable = 1 - Fraction(self.reserved_bytes, self.device.memory_bytes)
        return {
            "max_num_seqs": self.max_sequences // self.parallel.replicas,
            "max_model_len": min(self.context, self.model.max_context or self.context),
            "gpu_memory_utilization": int(usable * 100) / 100,
            "tensor_parallel_size": self.parallel.tensor,
            "pipeline_parallel_size": self.parallel.pipeline,
            "data_parallel_size": self.parallel.replicas,
            "enable_expert_parallel": self.parallel.expert > 1,
        }

    def __repr__(self) -> str:
        return f"<Plan: {self.model.name} as {self.scheme.name}, {number(self.bytes_per_token)} B per token>"

    def formula(self) -> str:
        """How bytes per token come about, with the numbers put in."""
        return self.cache.formula()


def plan(
    config: Source,
    *,
    kv_format: str = "native",
    memory: int | str | None = None,
    device: str | None = None,
    bandwidth: int | str | None = None,
    host_memory: int | str | None = None,
    weights: int | str | None = None,
    parameters: int | str | None = None,
    weights_dtype: str | None = None,
    context: int | None = None,
    sequences: int = 1,
    block_size: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    margin: float | None = None,
    activations: int | str | None = None,
) -> Plan:
    """Say what the cache of a model costs and, given a memory, what fits.

    config        a Hugging Face config.json, its folder, its fields as a mapping, or a built-in name
    kv_format     a scheme: a format or record, then settings: "int4:64,recent=128"; "native" is the model's own
    memory, bandwidth   of one device, in bytes and bytes/s or as text ("80GiB"); device takes them from the table
    host_memory   a second tier for the pages of waiting sequences
    weights       bytes of all weights; or parameters and weights_dtype; else what the model is known to have
    context, sequences  tokens of a sequence (8192, or less if the model ends before), sequences at once
    block_size    tokens of a page; None is what the model's engines use
    margin        part of the memory that stays free: 0.1, on shared memory 0.2; a CPU host keeps 8 to 16 GiB instead
    activations   bytes for activations and workspaces; None is a twentieth of the memory

    Raises ArgumentError for sizes that make no sense, formats that the attention cannot have, and a memory smaller than
    the weights. That nothing fits is no error: `fits` is False and `shortfall_at` says by how much.
    """
    model = load(config)
    scheme = parse(kv_format)
    parallel = Parallel(tensor_parallel, pipeline_parallel, expert_parallel)
    context = min(DEFAULT_CONTEXT, model.max_context or DEFAULT_CONTEXT) if context is None else context
    for name, value in (("context", context), ("sequences", sequences)):
        if value < 1:
            raise ArgumentError(f"{name} is {value}; it must be 1 or more: ask for at least one")
    block_size = default_block_size(model, scheme) if block_size is None else block_size
    whole = Cache(model, scheme, block_size)
    target = _device(device, memory, bandwidth)
    known = _weights(model, weights, parameters, weights_dtype)
    if parallel.expert > 1 and known is not None and not known.experts:
        raise ArgumentError(
            f"expert_parallel is {parallel.expert}; the routed experts of {model.name} are unknown or absent: leave it "
            f"at 1, or use a config with n_routed_experts and moe_intermediate_size"
        )
    part = None if margin is None else _part(margin)
    activation_bytes = None if activations is None else parse_bytes(activations, "activations", least=0)
    reserved = 0
    if target is not None:
        reserved = int(target.memory_bytes * (target.default_margin if part is None else part)) + target.system_bytes
        if activation_bytes is None:
            activation_bytes = int(target.memory_bytes * DEFAULT_ACTIVATIONS)
    activation_bytes = activation_bytes or 0
    one = whole if parallel.tensor == 1 else Cache(model.on_one_of(parallel.tensor), scheme, block_size)
    stages = tuple(
        _stage(one, layers, known, parallel, target, reserved + activation_bytes)
        for layers in model.stages(parallel.pipeline)
    )
    result = Plan(
        model,
        scheme,
        whole,
        parallel,
        context,
        sequences,
        target,
        reserved,
        activation_bytes,
        0 if host_memory is None else parse_bytes(host_memory, "host_memory"),
        known,
        stages,
        (),
    )
    return _noted(result)


def need_fitting(config: Source, schemes: Iterable[str], block_size: int | None = None) -> None:
    """Raise ArgumentError, in the words of `plan`, for a scheme that a model cannot have or run, by its config alone.

    A model that `plan` does not know is left to its cache, which judges when it is made.
    """
    try:
        model = load(config)
    except ArgumentError:
        model = None
    for scheme in map(parse, schemes):
        if model is not None:
            Cache(model, scheme, block_size or default_block_size(model, scheme))
        need_runnable(scheme)


def _device(name: str | None, memory: int | str | None, bandwidth: int | str | None) -> Device | None:
    if name is None and memory is None:
        if bandwidth is not None:
            raise ArgumentError(
                f"bandwidth is {bandwidth!r} without a memory; a bound needs both: give memory or device"
            )
        return None
    base = find_device(name) if name is not None else Device("this device", "gpu", parse_bytes(memory or 0, "memory"))
    return Device(
        base.name,
        base.kind,
        base.memory_bytes if memory is None else parse_bytes(memory, "memory"),
        base.bandwidth if bandwidth is None else Fraction(parse_bytes(bandwidth, "bandwidth")),
        base.source,
    )


def _part(margin: float) -> Fraction:
    if not 0 <= margin < 1:
        raise ArgumentError(f"margin is {margin}; it is a part of the memory from 0 up to 1: write 0.1 for 10 percent")
    return Fraction(str(margin))


def _weights(
    model: Model, weights: int | str | None, parameters: int | str | None, dtype: str | None
) -> Weights | None:
    """Bytes of the weights: as given, as measured beside the config, or parameters x dtype; None if unknown."""
    count = model.parameters if parameters is None else parse_count(parameters, "parameters")
    if dtype is not None and dtype not in WEIGHT_BITS:
        raise ArgumentError(f"weights_dtype is {dtype!r}; it must be one of {', '.join(WEIGHT_BITS)}: choose one")
    if dtype is not None and count is None:
        raise ArgumentError(f"weights_dtype is {dtype!r} and the number of parameters is unknown: give parameters too")
    experts = model.expert_parameters or 0
    if count is not None and experts > count:
        raise ArgumentError(
            f"parameters is {count}; the routed experts of {model.name} alone have {experts}: correct parameters"
        )
    if weights is not None or (model.weights_bytes and dtype is None and parameters is None):
        total = parse_bytes(weights, "weights", least=0) if weights is not None else model.weights_bytes or 0
        expert_bytes = total * experts // count if count else 0
        label = "given" if weights is not None else "measured"
    elif count is not None and (dtype or model.weights_dtype or parameters is not None):
        dense_dtype = dtype or model.weights_dtype or "bf16"
        expert_dtype = dtype or model.experts_dtype or dense_dtype
        expert_bytes = int(experts * WEIGHT_BITS[expert_dtype] / 8)
        total = expert_bytes + int((count - experts) * WEIGHT_BITS[dense_dtype] / 8)
        label = dense_dtype if expert_dtype == dense_dtype else f"{dense_dtype}, experts {expert_dtype}"
        label = f"{count / 1e9:.4g}B parameters in {label}"
    else:
        return None
    if model.active_parameters is not None and count:
        return Weights(total, label, expert_bytes, total * model.active_parameters // count)
    return Weights(total, label, expert_bytes, None if model.has_experts else total)


def _stage(
    cache: Cache,
    layers: range,
    weights: Weights | None,
    parallel: Parallel,
    target: Device | None,
    reserved: int,
) -> Stage:
    part = Fraction(len(layers), len(cache.model.layers))
    here = cache.stage(layers)
    held = weights.on_device(parallel, part) if weights else 0
    read = weights.read_on_device(parallel, part) if weights else Fraction(0)
    if target is not None and held > target.memory_bytes:
        raise ArgumentError(
            f"the memory of {target.name} is {target.memory_bytes / 2**30:.1f} GiB; the weights of {cache.model.name} "
            f"take {held / 2**30:.1f} GiB on each device: use more devices, smaller weights or another device"
        )
    left = target.memory_bytes - reserved - held - here.fixed_scale_bytes if target else 0
    return Stage(here, held, read, left)


def _noted(made: Plan) -> Plan:
    """The plan with what its reader should know."""
    model, target = made.model, made.device
    notes = list(model.notes)
    if target is not None and made.weights is None:
        notes.append("weights are not counted, since their size is unknown: give --parameters or --weights")
    if model.max_context is not None and made.context > model.max_context:
        notes.append(f"the context exceeds the {model.max_context} tokens that {model.name} was made for")
    if target is not None and target.kind == "cpu":
        notes.append(f"{target.system_bytes / 2**30:.0f} GiB stay with the system, so that it does not swap")
    if target is not None and target.kind in ("cpu", "shared") and made.fits is False:
        short = made.shortfall_at(made.context) / 2**30
        notes.append(f"this machine would swap: {short:.1f} GiB more than it has beside its reserve")
    return replace(made, notes=tuple(notes))


def _last(holds: Callable[[int], bool], end: int) -> int:
    """The largest number below `end` for which a condition holds that holds for no larger one; 0 if it never does."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
