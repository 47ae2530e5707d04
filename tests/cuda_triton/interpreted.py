"""Runs launchers on CPU tensors with kernels interpreted and judges each sample by the reference in float64.

A process of its own (`python -m tests.cuda_triton.interpreted [--every-dtype | --edges] OP...`), since
TRITON_INTERPRET must be set before triton is imported and nothing can be compiled then. Without a flag each sample is
run in one of the three dtypes, in turn. Prints one JSON object: op -> {sample: fault, or null where it passed, or the
list of reasons where it was refused}. With --edges, samples are those of tests/edges.py; what OTHERS name may be asked
for beside ops.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch

from kvbackend import backends
from kvbackend.backends.cuda_triton import (
    accumulate_scores,
    attending,
    compact_cache,
    scoring,
    shared_kv_attention,
    sparse_attention,
    sparse_mla_attention,
)
from kvbackend.matrix import DTYPES, TOLERANCES, copy_arguments, difference, flat_results, in_float64
from kvbackend.ops import registry
from kvbackend.spec import Op
from tests import edges

from . import far, quantized


def fault_of(op: Op, args: dict[str, Any]) -> str | None:
    """What is wrong with the launcher's result on one call; None: nothing."""
    bound = op.bind((), args)
    adapter = backends.registered()["cuda_triton"].adapter(op.name)
    assert adapter is not None
    got = copy_arguments(bound)
    wanted = in_float64(op, bound)
    want = flat_results(op, op.reference(**wanted), wanted)
    result = adapter.run(**got)
    for name, tensor in flat_results(op, result, got).items():
        apart = difference(tensor, want[name].to(tensor.dtype))
        allowed = 0.0 if op.exact else TOLERANCES.get(tensor.dtype, 0.0)
        if not apart <= allowed:
            return f"{name} differs by {apart:.3g} of its largest value; allowed {allowed:.3g}"
    for name, value in got.items():
        if isinstance(value, torch.Tensor) and name not in op.mutates and difference(value, bound[name]):
            return f"{name} was written, but the op does not declare it"
    return None


SLOW = ("lightning_indexer", "candidate_blocks")  # mostly of kernels that have tests of their own: a third will do


def calls(name: str, every_dtype: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The op's samples, in all dtypes or in one each."""
    for turn, dtype in enumerate(DTYPES):
        for index, (sample, args) in enumerate(registry[name].make_samples("cpu", dtype)):
            if every_dtype or (index % len(DTYPES) == turn and (turn == 0 or name not in SLOW)):
                yield f"{sample}, {str(dtype).removeprefix('torch.')}", args
    if name in quantized.OPS:
        for dtype in DTYPES if every_dtype else (torch.bfloat16,):
            for kv_format, args in quantized.calls(name, dtype):
                yield f"{kv_format}, {str(dtype).removeprefix('torch.')}", args


# So that samples have several tiles, splits and turns.
SMALL = (
    (scoring, "TILE", 16),
    (attending, "MIN_TOKENS", 8),
    (accumulate_scores, "MIN_TOKENS", 8),
    (shared_kv_attention, "MIN_TOKENS", 8),
    (sparse_attention, "MIN_TOKENS", 8),
    (sparse_mla_attention, "SPLIT_TOKENS", 2),
    (compact_cache, "BUFFER_BYTES", 512),
)


def steady_products() -> Any:
    """The interpreter's tl.dot in float64, then rounded.

    numpy's float32 products add in an order that goes by the CPU and by the shapes; kernels that make a score twice, in
    tiles of two shapes, need the same one.
    """
    matmul = np.matmul

    def product(a: Any, b: Any, dtype: Any) -> Any:
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    return mock.patch.object(np, "matmul", product)


def quicken() -> None:
    """Spare the interpreter what it does again and again to the same end: half of its time.

    A device function called by another one no longer makes it look through triton.language again (what the launch of a
    kernel put there stays until it ends, and what a library function finds, for good). Sums and products of integers
    are no longer made a second time in 64 bits for an assertion, which is off. Types and shapes are made once each.
    """
    from triton.language import core
    from triton.runtime import interpreter

    seen: set[str] = set()

    def call(function: Any, *args: Any, **constants: Any) -> Any:
        if function.fn.__module__ not in seen:
            seen.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **constants)

    numpy_types: dict[str, Any] = {}
    find_numpy_type = interpreter._get_np_dtype

    def numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(type)
        return numpy_types[name]

    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    make_block = core.block_type.__init__

    def block(type: Any, element: Any, shape: Any) -> None:
        known = element.name, tuple(map(core._unwrap_if_constexpr, shape))
        if known not in blocks:
            make_block(type, element, shape)
            blocks[known] = vars(type)
        vars(type).update(blocks[known])

    shapes: dict[tuple[int, ...], Any] = {}
    make_tensor = core.tensor.__init__

    def tensor(value: Any, handle: Any, type: Any) -> None:
        known = tuple(type.shape) if type.is_block() else ()
        if known not in shapes:
            make_tensor(value, handle, type)
            shapes[known] = value.shape, value.numel
        value.handle, value.type, value.dtype = handle, type, type.scalar
        value.shape, value.numel = shapes[known]

    for owner, name, replacement in (
        (interpreter.InterpretedFunction, "__call__", call), (interpreter, "_get_np_dtype", numpy_type),
        (core.block_type, "__init__", block), (core.tensor, "__init__", tensor),
        (interpreter.interpreter_semantic, "binary_op_sanitize_overflow_impl", lambda *operands: None),
    ):  # fmt: skip
        mock.patch.object(owner, name, replacement).start()


def judged(name: str, samples: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    op = registry[name]
    adapter = backends.registered()["cuda_triton"].adapter(name)
    assert adapter is not None, f"no launcher for {name}"
    found: dict[str, Any] = {}
    for sample, args in samples:
        bound = op.bind((), args)
        reasons = list(adapter.unsupported(**op.dispatcher.views(bound)))
        found[sample] = reasons or fault_of(op, bound)
    return found


def verdicts(name: str, every_dtype: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        for module, size, number in SMALL:
            stack.enter_context(mock.patch.object(module, size, number))
        return judged(name, calls(name, every_dtype))


# What launchers may refuse of the samples: op -> words that the reason must hold.
ALLOWED_REFUSALS = {
    "quantize_kv": "whose groups span tokens",
    "paged_attention": "reads keys as they are stored",  # rope at read
    "accumulate_scores": "reads keys as they are stored",
    "sparse_mla_attention": "whose scales are shuffled",
    "indexer_logits": "q is torch.float8_e4m3fn",
}


def complaints(name: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with the verdicts on an op: faults, refusals that are not allowed, and too few runs."""
    wrong = [f"{name}, {sample}: {verdict}" for sample, verdict in found.items() if isinstance(verdict, str)]
    reasons = {reason for verdict in found.values() if isinstance(verdict, list) for reason in verdict}
    wrong += [f"{name} refuses: {reason}" for reason in reasons if ALLOWED_REFUSALS.get(name, "none") not in reason]
    if sum(verdict is None for verdict in found.values()) <= len(found) // 2:
        wrong.append(f"{name}: too few of {len(found)} samples ran")
    return wrong


def batch_mates() -> dict[str, str | None]:
    """Whether a row's bits depend on the batch that it is in."""
    found: dict[str, str | None] = {}
    for name, (mixed, alone) in quantized.batch_mates().items():
        adapter = backends.registered()["cuda_triton"].adapter(name)
        assert adapter is not None
        many, one = (adapter.run(**registry[name].bind((), call)) for call in (mixed, alone))
        same = torch.equal(many[0][-1], one[0][0]) and torch.equal(many[1][-1], one[1][0])
        found[name] = None if same else "differs in a batch"
    return found


OTHERS = {"far blocks": far.verdicts, "batch mates": batch_mates}


def main(arguments: list[str]) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="+")
    parser.add_argument("--every-dtype", action="store_true")
    parser.add_argument("--edges", action="store_true")
    asked = parser.parse_args(arguments)
    steady_products().start()
    quicken()
    found: dict[str, Any] = {}
    for name in asked.ops:
        start = time.perf_counter()
        if name in OTHERS:
            found[name] = OTHERS[name]()
        elif asked.edges:
            samples = ((sample, args) for sample, _, args in edges.calls(name, interpreted=True))
            with mock.patch.object(attending, "MERGED", 512):  # a quarter of the programs; samples have several tiles
                found[name] = judged(name, samples)
        else:
            found[name] = verdicts(name, asked.every_dtype)
        print(f"{name}: {len(found[name])} samples, {time.perf_counter() - start:.1f} s", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
