"""Memory of a process that calls kernels for long stays what it was."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvbackend.ops import concat_and_cache_mla, paged_attention
from kvbackend.ops._samples import Maker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory the process has")
MIB = 1 << 20


def growth(run: Callable[[], None]) -> int:
    """Bytes that the process has more after `run` than before."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    run()
    return resident() - before


def test_calls_leave_nothing_behind() -> None:
    """torch 2.13's own way to hand a string to a kernel leaks it: 80 bytes a call, 9 MiB here."""
    samples = concat_and_cache_mla.make_samples("cpu", torch.float32)
    call = dict(next(args for name, args in samples if "token_head" in name))

    def run() -> None:
        for _ in range(120_000):
            write(**call)

    write = concat_and_cache_mla.resolve(**call)
    write(**call)
    assert growth(run) < 2 * MIB


def test_buffers_kept_for_the_next_call_are_bounded() -> None:
    """Each call here needs buffers of other sizes, about a MiB of them a thread."""
    make = Maker(torch.device("cpu"), torch.bfloat16)

    def attend(dim: int) -> None:
        key, value = make.randn(2, 16, 1, dim), make.randn(2, 16, 1, dim)
        paged_attention(
            q=make.randn(16, 16, dim), key_cache=key, value_cache=value, block_table=make.ints([[0, 1]]),
            seq_lens=make.ints([32]), cu_seqlens_q=make.ints([0, 16]), max_seqlen_q=16, softmax_scale=0.1,
        )  # fmt: skip

    def run() -> None:
        for dim in range(64, 1024, 32):
            attend(dim)

    attend(1024)
    assert growth(run) < 24 * MIB
