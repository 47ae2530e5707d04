"""What the CPU kernels promise beyond the contract: no foreign memory, 64-bit offsets, all instruction sets."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kvbackend import backends, native, ops, use
from kvbackend.matrix import DTYPES, TOLERANCES, difference
from kvbackend.ops import registry

pytestmark = pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)

BLOCKS, BLOCK_SIZE, DIM = 5, 4, 6
FAR = (1 << 62, -(1 << 63), (1 << 63) - 1, 1 << 31, -(1 << 31))
GUARD = 99.0


@pytest.fixture(autouse=True)
def _only_the_cpu_kernels():
    with use("cpu"):
        yield


def guarded(fill: float = 0.0, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """A cache [nb, bs, dim] in the middle of a buffer, and the whole buffer."""
    buffer = torch.full((3 * BLOCKS, BLOCK_SIZE, dim), GUARD)
    cache = buffer[BLOCKS : 2 * BLOCKS]
    return cache.fill_(fill), buffer


def around(limit: int) -> list[int]:
    """Ids outside [0, limit): the nearest, and some whose offset wraps around."""
    return [-1, -2, -limit, limit, limit + 1, 2 * limit - 1, *FAR]


def assert_guards(buffer: Tensor) -> None:
    assert (buffer[:BLOCKS] == GUARD).all()
    assert (buffer[2 * BLOCKS :] == GUARD).all()


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("offset", [0, 24, 32])  # of a cache from a cache line, in numbers
@pytest.mark.parametrize("dim", [128, 100])
def test_large_writes_touch_their_rows_alone(dim: int, offset: int, heads_first: bool) -> None:
    """So many rows go past the caches where they are whole lines; others begin or end within a line."""
    tokens, blocks, block_size, heads = 2048, 140, 16, 4
    shape = (blocks, heads, block_size, dim) if heads_first else (blocks, block_size, heads, dim)
    buffers = [torch.randn(blocks * block_size * heads * dim + 2 * offset).bfloat16() for _ in range(2)]
    wanted = [buffer.clone() for buffer in buffers]
    caches, expected = (
        [buffer[offset : len(buffer) - offset].view(shape) for buffer in each] for each in (buffers, wanted)
    )
    if heads_first:
        caches, expected = ([cache.transpose(1, 2) for cache in each] for each in (caches, expected))
    rows = [torch.randn(tokens, heads, dim).bfloat16() for _ in range(2)]
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[::100] = -1
    written = slots >= 0
    for cache, values in zip(expected, rows, strict=True):
        cache[slots[written] // block_size, slots[written] % block_size] = values[written]
    ops.reshape_and_cache(*rows, *caches, slots)
    for buffer, want in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer, want)


@pytest.mark.parametrize("name", ["reshape_and_cache", "concat_and_cache_mla", "mla_project_kv"])
def test_slots_outside_the_cache_are_skipped(name: str) -> None:
    slots = torch.tensor([*around(BLOCKS * BLOCK_SIZE), 7])
    tokens = len(slots)
    (first, first_buffer), (second, second_buffer) = guarded(), guarded()
    if name == "reshape_and_cache":
        heads = first.unsqueeze(2), second.unsqueeze(2)
        ops.reshape_and_cache(torch.ones(tokens, 1, DIM), torch.ones(tokens, 1, DIM), *heads, slots)
    elif name == "concat_and_cache_mla":
        ops.concat_and_cache_mla(torch.ones(tokens, DIM), torch.ones(tokens, DIM), first, second, slots)
    else:
        table = torch.ones(3, DIM)
        weight = torch.ones(2 * DIM, 8)
        ops.mla_project_kv(
            torch.ones(tokens, 8), weight, torch.ones(DIM), table, slots, 1e-6, True, first, second, slots
        )
    for cache, buffer in ((first, first_buffer), (second, second_buffer)):
        written = cache.flatten(0, 1).ne(0).any(-1)
        assert written.nonzero().flatten().tolist() == [7]
        assert_guards(buffer)


@pytest.mark.parametrize("name", ["copy_blocks", "swap_blocks"])
def test_pairs_with_a_block_outside_its_pool_are_skipped(name: str) -> None:
    wrong = around(BLOCKS)
    pairs = torch.tensor([*([1, b] for b in wrong), *([b, 3] for b in wrong), [1, 2]])
    source, _ = guarded(1.0)
    target, buffer = guarded()
    if name == "copy_blocks":
        target[1] = 1.0
        ops.copy_blocks(target, pairs)
        target[1] = 0.0
    else:
        ops.swap_blocks(source, target, pairs)
    assert target.flatten(1).eq(1).all(-1).tolist() == [False, False, True, False, False]
    assert target.count_nonzero() == target[2].numel()
    assert_guards(buffer)


def test_gathering_from_blocks_outside_the_cache_gives_zeros() -> None:
    cache, _ = guarded(1.0)
    table = torch.tensor([*around(BLOCKS), 2])[None]
    tokens = table.numel() * BLOCK_SIZE
    out = ops.gather_cache(cache, table, torch.tensor([0, tokens], dtype=torch.int32), tokens)
    assert out[-BLOCK_SIZE:].eq(1).all()
    assert not out[:-BLOCK_SIZE].any()


@pytest.mark.parametrize("bounds", [[0, 9, 3, 40], [0, -(1 << 31), (1 << 31) - 1, 5], [0, 0, 0, (1 << 31) - 1]])
@pytest.mark.parametrize("starts", [[0, 0, 0], [-7, (1 << 31) - 1, -(1 << 31)], [2, 19, 20]])
def test_gathering_with_wrong_lengths_stays_in_the_cache(bounds: list[int], starts: list[int]) -> None:
    cache, _ = guarded(1.0)
    table = torch.tensor([[0, 4], [4, 0], [2, 2]])
    int32 = {"dtype": torch.int32}
    out = ops.gather_cache(cache, table, torch.tensor(bounds, **int32), 30, torch.tensor(starts, **int32))
    assert ((out == 0) | (out == 1)).all()


def test_positions_outside_the_table_leave_the_row() -> None:
    positions = torch.tensor(around(3))
    x = torch.randn(len(positions), 2, DIM)
    table = torch.full((9, DIM), GUARD)[3:6].zero_()
    assert ops.apply_rope(x, positions, table).equal(x)
    assert not ops.apply_rope(x, positions.clamp(0, 2), table).any()


@pytest.fixture
def huge() -> Tensor:
    """Three blocks of 2 slots, 2^30 + 8 elements apart, so block 2 lies beyond 2^31. Memory commits when touched."""
    if sys.platform != "linux":
        pytest.skip("needs memory that is committed lazily")
    stride = (1 << 30) + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, 2 * (2 * stride + 2 * DIM), flags=flags)
    return torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((3, 2, DIM), (stride, DIM, 1))


def test_offsets_have_64_bits(huge: Tensor) -> None:
    rows = torch.randn(2, DIM).bfloat16()
    ops.concat_and_cache_mla(rows, rows[:, :0], huge, huge[..., :0], torch.tensor([5, 0]))
    assert huge[2, 1].equal(rows[0])
    assert huge[0, 0].equal(rows[1])
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    out = ops.gather_cache(huge, torch.tensor([[2, 0]], dtype=torch.int32), bounds, 4)
    assert out.equal(torch.stack((torch.zeros(DIM).bfloat16(), rows[0], rows[1], torch.zeros(DIM).bfloat16())))
    huge[0] = 0
    ops.copy_blocks(huge, torch.tensor([[2, 0]], dtype=torch.int32))
    assert huge[0].equal(huge[2])
    pool = torch.zeros(2, 2, DIM).bfloat16()
    ops.swap_blocks(huge, pool, torch.tensor([[2, 1]]))
    assert pool[1].equal(huge[2])
    assert not pool[0].any()


VARIANTS = """
import ctypes, torch
from kvbackend import native
from kvbackend.matrix import run_cell
from kvbackend.ops import registry
for name in %r:
    for sample in list(registry[name].make_samples("cpu", torch.bfloat16))[::3]:
        cell = run_cell(registry[name], "cpu", "cpu", torch.bfloat16, *sample)
        if cell.status == "fail":
            print(cell.op, cell.sample, *cell.reasons)
isa = ctypes.CDLL(str(native.FOLDER / "libkvbackend_cpu.so")).kvbackend_isa
isa.restype = ctypes.c_char_p
print(isa().decode())
"""
NAMES = [
    "reshape_and_cache", "concat_and_cache_mla", "gather_cache", "copy_blocks", "swap_blocks", "merge_attn_states",
    "absorb_q", "project_out", "mla_project_kv", "apply_rope", "compact_cache", "select_tokens", "lowrank_project",
    "lowrank_reconstruct", "dequantize_kv", "quantize_kv", "transcode", "compress_kv",
    "shared_kv_attention", "store_rows",
]  # fmt: skip


def test_lower_instruction_sets_give_the_reference_too() -> None:
    """The best one runs in every other test."""
    isa = ctypes.CDLL(str(native.FOLDER / "libkvbackend_cpu.so")).kvbackend_isa
    isa.restype = ctypes.c_char_p
    order = native.CPU_ISAS
    lower = order[: order.index(isa().decode())]
    if not lower:
        pytest.skip("this CPU, or KVBACKEND_CPU_ISA, has no instruction set but the plain one")
    children = {
        name: subprocess.Popen(
            [sys.executable, "-c", VARIANTS % NAMES],
            env={**os.environ, "KVBACKEND_CPU_ISA": name}, stdout=subprocess.PIPE, text=True,
        )
        for name in lower
    }  # fmt: skip
    said = {name: child.communicate(timeout=200)[0].strip() for name, child in children.items()}
    assert said == {name: name for name in lower}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["absorb_q", "project_out"])
def test_product_kernels_take_many_tokens_and_float32(name: str, dtype: torch.dtype) -> None:
    """Their adapters leave these to torch."""
    op = registry[name]
    for sample, args in op.make_samples("cpu", dtype):
        got, want = native.kernel(op)(*args.values()), op.reference(**args)
        assert difference(got, want) <= TOLERANCES[dtype], sample
