"""Block copies by csrc/npu: bytes, directions, streams, and how the fake ACL runtime was asked for them."""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

import pytest
import torch

import kvbackend
import kvbackend.native
from kvbackend import UnsupportedError
from kvbackend.backends.npu import copy_blocks, own, swap_blocks
from kvbackend.ops import registry

IN, OUT, WITHIN = 1, 2, 3  # aclrtMemcpyKind
PAIRS = [[0, 5], [1, 6], [-1, 3], [4, 0], [2, -1]]
COPIED = {5: 0, 6: 1, 0: 4}  # block of the target -> block of the source


def made() -> list[dict[str, Any]]:
    """The copies since the last call."""
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.ascend_stub_copies.restype = ctypes.c_char_p
    torch.npu.synchronize()
    copies: list[dict[str, Any]] = json.loads(runtime.ascend_stub_copies())
    return copies


def pools(num_source: int = 5, num_target: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """On the host: blocks of 12 bfloat16 numbers, and others to be written."""
    source = torch.arange(num_source * 12).reshape(num_source, 3, 2, 2).bfloat16()
    return source, torch.full((num_target, 3, 2, 2), -1.0).bfloat16()


def wanted(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target = target.clone()
    for to, origin in COPIED.items():
        target[to] = source[origin]
    return target


def swap(source: torch.Tensor, target: torch.Tensor, pairs: Any = PAIRS, dtype: torch.dtype = torch.int64) -> None:
    with kvbackend.use("npu"):
        registry["swap_blocks"](source, target, torch.tensor(pairs, dtype=dtype).reshape(-1, 2))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("host", ["pinned", "pageable"])
@pytest.mark.parametrize("kind", [IN, OUT, WITHIN])
def test_blocks_arrive_and_neighbours_are_joined(kind, host, index) -> None:
    source, target = pools()
    expected = wanted(source, target)
    if kind == IN:
        source, target = (source.pin_memory() if host == "pinned" else source), target.to("npu:0")
    elif kind == OUT:
        source, target = source.to("npu:0"), (target.pin_memory() if host == "pinned" else target)
    else:
        source, target = source.to("npu:0"), target.to("npu:0")
    made()
    swap(source, target, dtype=index)
    copies = made()
    assert torch.equal(target.cpu(), expected)
    how = "async" if kind == WITHIN else "batch" if host == "pinned" else "blocking"
    assert {copy["how"] for copy in copies} == {how}
    assert {copy["kind"] for copy in copies} == {kind}
    block = 12 * 2
    if how == "batch":
        assert [(copy["count"], copy["bytes"]) for copy in copies] == [(2, 3 * block)]
    else:
        assert [copy["bytes"] for copy in copies] == [2 * block, block]


def test_a_driver_without_batches_gets_single_copies(monkeypatch) -> None:
    monkeypatch.setenv("ASCEND_STUB_BATCHES", "0")
    source, target = pools()
    expected, pinned = wanted(source, target), target.pin_memory()
    made_on_device = source.to("npu:0")
    made()
    swap(made_on_device, pinned)
    assert [copy["how"] for copy in made()] == ["async", "async"]
    assert torch.equal(pinned, expected)


def test_copies_run_on_the_current_stream_and_keep_their_place() -> None:
    source, target = pools()
    on_device, other = torch.zeros_like(source, device="npu:0"), target.to("npu:0")
    rows, numbers = source.to("npu:0"), torch.arange(1 << 20).float().to("npu:0")
    stream = torch.npu.Stream()
    made()
    with torch.npu.stream(stream):
        numbers.sort(stable=True)  # keeps the queue busy for a while
        on_device.copy_(rows)  # before the copy: it reads what this writes
        swap(on_device, other)
        on_device.zero_()
    streams = {copy["stream"] for copy in made() if copy["kind"] == WITHIN}
    swap(on_device, other, [[0, 1]])
    assert len(streams) == 1
    assert streams != {copy["stream"] for copy in made()}
    expected = wanted(source, target)
    expected[1] = 0
    assert torch.equal(other.cpu(), expected)


def test_interleaved_pools_are_copied_block_by_block() -> None:
    """Keys of a pool whose blocks hold keys and values: a block is dense, and the next one is not beside it."""
    source, target = pools()
    both = torch.stack((source, source + 100), 1).to("npu:0")
    out = torch.stack((target, target), 1).to("npu:0")
    made()
    swap(both[:, 1], out[:, 0])
    assert len(made()) == 3
    assert torch.equal(out[:, 0].cpu(), wanted(source + 100, target))
    assert torch.equal(out[:, 1].cpu(), target)
    dense = target.to("npu:0")
    swap(both[:, 1], dense)
    assert torch.equal(dense.cpu(), wanted(source + 100, target))


@pytest.mark.parametrize("pairs", [[[0, 2], [3, 3]], [[0, 2], [1, 4]], [[1, 2], [0, 3]]])
def test_only_blocks_that_go_on_in_both_pools_are_joined(pairs) -> None:
    source, target = pools()
    expected = target.clone()
    expected[[to for _, to in pairs]] = source[[origin for origin, _ in pairs]]
    on_device = target.to("npu:0")
    swap(source.to("npu:0"), on_device, pairs)
    assert torch.equal(on_device.cpu(), expected)


def test_nothing_is_copied_for_no_pairs_and_for_blocks_that_do_not_exist() -> None:
    source, target = (pool.to("npu:0") for pool in pools())
    before = target.cpu()
    for pairs in ([], [[-1, -1]], [[5, 0], [0, 8], [-2, 1]]):
        made()
        swap(source, target, pairs)
        assert not made()
    assert torch.equal(target.cpu(), before)


def test_pinned_memory_is_not_given_away_while_it_is_read() -> None:
    """The allocator keeps a freed block until an event behind the copies has passed."""
    runtime = ctypes.CDLL("libascendcl.so")
    source, target = pools()
    pinned, on_device = source.pin_memory(), target.to("npu:0")
    swap(pinned, on_device)
    torch.npu.synchronize()
    before = runtime.ascend_stub_events()
    del pinned
    torch.npu.synchronize()
    assert runtime.ascend_stub_events() == before + 1


def test_strided_blocks_are_refused() -> None:
    source, target = (pool.to("npu:0") for pool in pools())
    turned = target.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(UnsupportedError, match=r"target has strided blocks; .*: allocate"):
        swap(source, turned)
    with pytest.raises(UnsupportedError, match="cache has strided blocks"), kvbackend.use("npu"):
        registry["copy_blocks"](turned, torch.tensor([[0, 1]], device="npu:0"))


def test_two_devices_are_refused() -> None:
    class On:
        ndim, shape = 2, (1, 1)

        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

        def is_contiguous(self) -> bool:
            return True

    found = list(swap_blocks.unsupported(On("npu:0"), On("npu:1")))
    assert found == ["source is on npu:0 and target on npu:1; one NPU copies: copy through host memory"]


def test_copy_blocks_reads_the_pairs_once_and_copies_within_the_pool() -> None:
    source, _ = pools()
    cache, pairs = source.to("npu:0"), torch.tensor([[0, 3], [-1, 2], [1, 4]]).to("npu:0")
    made()
    with kvbackend.use("npu"):
        registry["copy_blocks"](cache, pairs)
    copies = made()
    assert [(copy["kind"], copy["bytes"]) for copy in copies if copy["kind"] != OUT] == [(WITHIN, 48)]
    assert [copy["bytes"] for copy in copies if copy["kind"] == OUT] == [pairs.numel() * 8]
    assert torch.equal(cache.cpu(), source[[0, 1, 2, 0, 1]])


def test_copy_blocks_asks_the_reference_while_a_graph_is_captured(monkeypatch) -> None:
    monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)
    source, _ = pools()
    cache, pairs = source.to("npu:0"), torch.tensor([[0, 3]]).to("npu:0")
    made()
    copy_blocks.run(cache, pairs)
    assert not [copy for copy in made() if copy["kind"] == OUT]  # nothing is read on the host
    assert torch.equal(cache.cpu(), source[[0, 1, 2, 0, 4]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, t, m: (s[:, :2], t, m), "must be alike"),
        (lambda s, t, m: (s.float(), t, m), "must be alike"),
        (lambda s, t, m: (s, t, m.to("npu:0")), "on the host"),
        (lambda s, t, m: (s, t, m[:, :1]), "on the host"),
        (lambda s, t, m: (s.mT, t.mT, m), "strided pages"),
    ],
)
def test_the_kernel_itself_refuses_what_it_cannot_copy(change, words) -> None:
    """For those who call torch.ops.kvbackend_native directly."""
    source, target = (pool.to("npu:0") for pool in pools())
    with pytest.raises(RuntimeError, match=words):
        swap_blocks.run(*change(source, target, torch.tensor([[0, 1]])))


def test_an_error_of_the_runtime_is_raised(monkeypatch) -> None:
    source, target = pools()
    on_device, pinned = source.to("npu:0"), target.pin_memory()
    torch.npu.synchronize()
    monkeypatch.setenv("ASCEND_STUB_COPIES", "507899")
    with pytest.raises(RuntimeError, match="swap_blocks: the ACL runtime answered 507899"):
        swap(on_device, target)
    if os.environ.get("TASK_QUEUE_ENABLE") == "0":  # behind a queue the error ends the stream, as on a device
        with pytest.raises(RuntimeError, match="507899"):
            swap(on_device, pinned)


def flipped(run):
    return lambda source, target, pairs: run(target, source, pairs)


def pairs_as(change):
    return lambda run: lambda source, target, pairs: run(source, target, change(pairs))


@pytest.mark.parametrize(
    "mistake",
    [
        flipped,
        pairs_as(lambda pairs: pairs.flip(1)),
        pairs_as(lambda pairs: pairs[1:]),
        pairs_as(lambda pairs: pairs.clamp(min=0)),
    ],
    ids=["pools swapped", "pairs flipped", "first pair dropped", "padding as block 0"],
)
def test_mistakes_are_noticed(mistake, monkeypatch) -> None:
    monkeypatch.setattr(swap_blocks, "run", mistake(swap_blocks.run))
    registry["swap_blocks"].dispatcher.forget()
    source, target = pools(8, 8)
    on_device = target.to("npu:0")
    swap(source.to("npu:0"), on_device)
    monkeypatch.undo()
    registry["swap_blocks"].dispatcher.forget()
    assert not torch.equal(on_device.cpu(), wanted(source, target))


def test_the_library_is_of_this_torch_npu() -> None:
    import torch_npu

    path = kvbackend.native.FOLDER / f"torch_npu-{torch_npu.__version__}" / "libkvbackend_npu.so"
    assert path.exists()
    assert not list(own.missing(registry["swap_blocks"]))
    assert list(own.missing(registry["paged_attention"])) == [
        "the npu library was built without paged_attention: run `python setup.py build_npu` again"
    ]
