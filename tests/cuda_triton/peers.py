"""What stands beside the Triton kernels on a GPU: the other backends that are installed, and FlexAttention.

Providers are judged by the reference on the cases of tests/providers, and timed on the calls of shapes.py that they
take. Dry, on the CPU, their doubles stand in for them, so that all of this runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvbackend import backends
from kvbackend.backends import Backend, nvidia
from kvbackend.ops import registry
from tests.providers import cases, judge

from .shapes import Call, Shapes

DRY_CASES = 3  # of an op


@contextmanager
def doubles(dry: bool) -> Iterator[None]:
    """Dry: the doubles in the libraries' places, on a GPU of compute capability 9.0."""
    if not dry:
        yield
        return
    capability, modules = nvidia.capability, {name: sys.modules.get(name) for name in judge.PROVIDERS}
    try:
        nvidia.capability = lambda: (9, 0)  # type: ignore[assignment]
        for name in judge.PROVIDERS:
            sys.modules[name] = import_module(f"tests.doubles.{name}").library()
        yield
    finally:
        nvidia.capability = capability
        for name, module in modules.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def installed(dry: bool) -> list[Backend]:
    """The backends of CUDA beside Triton that this machine can use."""
    found = [backend for backend in backends.serving("cuda") if backend.name != "cuda_triton"]
    return [backend for backend in found if (backend.name in judge.PROVIDERS if dry else not backend.missing())]


def on_device(args: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The call on a device, with the same strides, offsets and sharing of storage."""
    storages: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages or tensor.numel() == 0:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            storages[storage.data_ptr()] = whole.to(device)
        whole = storages[storage.data_ptr()].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: moved(value) if isinstance(value, Tensor) else value for name, value in args.items()}


def verdicts(device: str, dry: bool) -> dict[str, Any]:
    """provider -> op -> case -> what is wrong with its result, its reasons, or None where it is right."""
    report: dict[str, Any] = {}
    with doubles(dry):
        for backend in installed(dry):
            if backend.name not in judge.PROVIDERS:
                continue  # its samples are the contract's
            for op in judge.adapted(backend.name):
                found: dict[str, Any] = report.setdefault(backend.name, {}).setdefault(op, {})
                for name, args in list(cases.of(backend.name, op, torch.bfloat16))[: DRY_CASES if dry else None]:
                    found[name] = judge.reasons(backend.name, op, args) or _fault(backend.name, op, args, device)
    return report


def _fault(provider: str, op: str, args: Mapping[str, Any], device: str) -> str | None:
    try:
        return "; ".join(judge.faults(op, args, judge.run(provider, op, on_device(args, device)))) or None
    except Exception as error:  # whatever it is, it is this case's verdict
        return f"{type(error).__name__}: {error}"


def good(report: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong; a refusal is not."""
    return not any(
        isinstance(verdict, str) for ops in report.values() for found in ops.values() for verdict in found.values()
    )


def times(
    name: str, args: dict[str, Any], dry: bool, median_us: Callable[[Callable[[], Any]], float]
) -> dict[str, float | str]:
    """backend -> microseconds on one call, or why it was not timed."""
    found: dict[str, float | str] = {}
    with doubles(dry):
        for backend in installed(dry):
            adapter = backend.adapter(name)
            if adapter is None:
                continue
            bound = registry[name].bind((), args)
            reasons = list(adapter.unsupported(**registry[name].dispatcher.views(bound)))
            try:
                found[backend.name] = reasons[0] if reasons else median_us(lambda: adapter.run(**bound))
            except Exception as error:  # the others are timed all the same
                found[backend.name] = f"{type(error).__name__}: {error}"
    return found


def calls(sizes: Shapes) -> Iterator[Call]:
    """Calls that Triton's own list has not: what the providers take in the form that their models have."""
    for case, queries in (("decode", 1), ("prefill", sizes.prefill // 2)):
        call = sizes.index(queries, "index_fp8_132")
        yield "indexer_logits", f"{case}, fp8 queries", call | dict(q=call["q"].to(torch.float8_e4m3fn))
    yield "sparse_mla_attention", "decode, v32_fp8_656", sizes.sparse_mla(1, "v32_fp8_656")
    written = sizes.shared_kv(1, "v4_fp8_584", "v4_fp8_584")
    yield "shared_kv_attention", "decode, V4, rows written before", written | dict(kv=None)


def flex(args: dict[str, Any], dense: list[Tensor], q: Tensor, compiled: bool) -> Callable[[], Any]:
    """FlexAttention on dense keys [B, Hk, S, D], causal; its mask is made before."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    queries, length = q.shape[2], dense[0].shape[2]

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (length - queries)

    mask = create_block_mask(seen, None, None, queries, length, device=q.device.type)
    attention = torch.compile(flex_attention) if compiled else flex_attention
    return lambda: attention(q, *dense, block_mask=mask, scale=args["softmax_scale"], enable_gqa=True)
