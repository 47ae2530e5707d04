"""What the tests of the CPU kernels share: calls over a pool, and processes of another instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbackend import native

ROOT = Path(__file__).parents[2]
ROWS = ("q", "q_nope", "q_pe", "weights", "pages", "topk_indices")  # arguments with a row for each query


def run_python(code: str, **environment: str) -> str:
    """What a process of its own prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on_isa(wanted: str, code: str) -> None:
    """Run the code with the kernels of an instruction set; skip where they use a lower one."""
    best, order = native.library("cpu").isa, native.CPU_ISAS
    if order.index(wanted) > order.index(best):
        pytest.skip(f"kernels use {best} here, not {wanted}")
    run_python(code, KVBACKEND_CPU_ISA=wanted)


def assert_isa(wanted: str) -> None:
    """The loaded library chose what was asked for."""
    assert native.library("cpu").isa == wanted, f"asked for {wanted}, the library chose {native.library('cpu').isa}"


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """To the bit; NaN equals itself."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def check_threads(run: Callable[..., tuple[Tensor, ...]], set_threads: Callable[[int], None], **args: Any) -> None:
    """The number of threads changes no bit."""
    set_threads(1)
    alone = run(**args)
    for threads in (2, 3, 16):
        set_threads(threads)
        assert_equal(run(**args), alone)


def check_batch_mates(run: Callable[..., tuple[Tensor, ...]], q_lens: Sequence[int], **args: Any) -> None:
    """The sequences of a call alone, each with so many queries, give the same bits as together."""
    together = run(**args)
    for index, (first, count) in enumerate(zip(args["cu_seqlens_q"].tolist(), q_lens, strict=False)):
        rows = slice(first, first + count)
        alone = args | {
            **{key: args[key][rows] for key in ROWS if key in args},
            "block_table": args["block_table"][index : index + 1],
            "seq_lens": args["seq_lens"][index : index + 1],
            "cu_seqlens_q": torch.tensor([0, count]).int(),
        }
        assert_equal(run(**alone), tuple(result[rows] for result in together))


def call(
    name: str, q_lens: list[int], seq_lens: list[int], dtype: torch.dtype = torch.float32, heads: int = 8,
    kv_heads: int = 2, dim: int = 64, rope: int = 16, block_size: int = 16, **other: Any,
) -> dict[str, Any]:  # fmt: skip
    """A call over a pool that is NaN wherever no token lies."""
    generator = torch.Generator().manual_seed(7)
    columns = max(1, *(-(-length // block_size) for length in seq_lens))
    num_blocks = len(seq_lens) * columns + 1
    blocks = torch.randperm(num_blocks, generator=generator)[: len(seq_lens) * columns]
    table = blocks.view(len(seq_lens), columns).int()
    row = (kv_heads, 2 * dim) if name == "paged_attention" else (dim + rope,)
    pool = torch.full((num_blocks, block_size, *row), torch.nan, dtype=dtype)
    for blocks, length in zip(table.long(), seq_lens, strict=True):
        index = torch.arange(length)
        pool[blocks[index // block_size], index % block_size] = torch.randn(length, *row, generator=generator).to(dtype)
    width = dim if name == "paged_attention" else dim + rope
    q = torch.randn(sum(q_lens), heads, width, generator=generator).to(dtype)
    if name == "paged_attention":
        tensors = dict(q=q, key_cache=pool[..., :dim], value_cache=pool[..., dim:])
    else:
        tensors = dict(q_nope=q[..., :dim], q_pe=q[..., dim:], ckv_cache=pool[..., :dim], kpe_cache=pool[..., dim:])
    offsets = torch.tensor([0, *q_lens]).cumsum(0).int()
    batch = dict(
        block_table=table, seq_lens=torch.tensor(seq_lens).int(), cu_seqlens_q=offsets, max_seqlen_q=max(q_lens)
    )
    return {**tensors, **batch, "softmax_scale": width**-0.5, "return_lse": True, **other}
