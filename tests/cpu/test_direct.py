"""Resolved callables that go past torch's dispatcher: they do what the dispatcher does, or leave it to it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvbackend
from kvbackend import backends, native
from kvbackend.matrix import copy_arguments
from kvbackend.ops import registry

REFUSING = [name for name in registry if getattr(backends.registered()["cpu"].adapter(name), "REFUSES", False)]
LONG_WAY = {"gather_cache", "store_rows", "swap_blocks"}  # what is chosen rests on more than sizes that kernels look at


def need_way() -> type:
    """The type of callables that go past the dispatcher."""
    try:
        from kvbackend import _build
    except ImportError as error:
        pytest.skip(f"kvbackend._build is not built: {error}")
    if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"torch {torch.__version__} has no C interface of DLPack")
    if reason := native.library("cpu").reason:
        pytest.skip(reason)
    cache = torch.zeros(2, 2, 4)
    resolved = registry["copy_blocks"].resolve(cache=cache, block_mapping=torch.tensor([[0, 1]]))
    assert type(resolved).__module__ == _build.__name__, "the simplest call of all does not take the short way"
    return type(resolved)


class Seen(TorchDispatchMode):
    """Counts what torch's dispatcher is given."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    """A tensor that could mean something else."""


def mla_write(tokens: int = 3) -> dict[str, Any]:
    cache = torch.zeros(4, 8, 20)
    return dict(
        ckv=torch.randn(tokens, 16), kpe=torch.randn(tokens, 4), ckv_cache=cache[..., :16], kpe_cache=cache[..., 16:],
        slot_mapping=torch.arange(tokens) * 5,
    )  # fmt: skip


def decode() -> dict[str, Any]:
    return dict(
        q=torch.randn(2, 4, 16), key_cache=torch.randn(6, 4, 2, 16), value_cache=torch.randn(6, 4, 2, 16),
        block_table=torch.tensor([[3, 1], [0, 5]], dtype=torch.int32), softmax_scale=0.25,
        seq_lens=torch.tensor([7, 2], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        max_seqlen_q=1,
    )  # fmt: skip


def both(name: str, example: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The callable that goes past the dispatcher and the one that does not."""
    way, resolved = need_way(), registry[name].resolve(**example)
    assert type(resolved) is way
    return resolved, resolved.__wrapped__


@pytest.mark.parametrize("name", REFUSING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_sample_is_to_the_bit_what_the_dispatcher_gives(name: str, dtype: torch.dtype) -> None:
    way, op, direct = need_way(), registry[name], 0
    for sample, args in op.make_samples("cpu", dtype):
        with kvbackend.use("cpu"):
            try:
                resolved = op.resolve(**args)
            except kvbackend.UnsupportedError:
                continue
        if type(resolved) is not way:
            continue
        ours, theirs = (copy_arguments(op.bind((), args)) for _ in range(2))
        with Seen() as seen:
            made = resolved(**ours)
        assert not any(native.NATIVE_NAMESPACE in op for op in seen.ops), sample
        expected = resolved.__wrapped__(**theirs)
        assert all(map(same, flat(made), flat(expected))), sample
        assert all(same(ours[key], theirs[key]) for key in op.mutates if ours[key] is not None), sample
        direct += 1
    assert (direct == 0) == (name in LONG_WAY)


def flat(result: Any) -> list[Tensor]:
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


def same(a: Tensor, b: Tensor) -> bool:
    as_bytes = [x.contiguous().flatten().view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(*as_bytes)


def test_arguments_by_place_by_name_in_any_order_and_left_out() -> None:
    example = decode()
    direct, otherwise = both("paged_attention", example)
    expected = otherwise(**example)[0]
    names = list(example)
    ordered = [example[name] for name in registry["paged_attention"].parameters if name in example]
    for made in (
        direct(*ordered),
        direct(*ordered[:3], **{name: example[name] for name in reversed(names) if name not in names[:3]}),
        direct(**dict(reversed(example.items()))),
        direct(**example, window=-1, causal=True, sinks=None, kv_format="auto"),
    ):
        assert torch.equal(made[0], expected)
    for wrong in (dict(example, of_nothing=1), {name: example[name] for name in names[1:]}):
        with pytest.raises(TypeError, match="paged_attention"):
            direct(**wrong)
    with pytest.raises(TypeError):
        direct(*ordered, q=example["q"])
    with pytest.raises(TypeError):
        direct(*range(40))


def other_ways() -> dict[str, dict[str, Any]]:
    example = mla_write()
    return {
        "a subclass": dict(example, ckv=example["ckv"].as_subclass(Subclass)),
        "another dtype of slots": dict(example, slot_mapping=example["slot_mapping"].int()),
        "a number of numpy": dict(decode(), softmax_scale=torch.tensor(0.25).numpy()[()]),
        "an int for a float": dict(decode(), softmax_scale=1),
    }


@pytest.mark.parametrize("what", other_ways())
def test_what_is_not_as_it_was_goes_the_other_way(what: str) -> None:
    call = other_ways()[what]
    name = "concat_and_cache_mla" if "ckv" in call else "paged_attention"
    direct, otherwise = both(name, mla_write() if "ckv" in call else decode())
    theirs = copy_arguments(call)
    outcomes = []
    for function, args in ((direct, call), (otherwise, theirs)):
        try:
            outcomes.append(flat(function(**args)) or [args["ckv_cache"], args["kpe_cache"]])
        except kvbackend.UnsupportedError as error:
            outcomes.append(str(error))
    if isinstance(outcomes[0], str):
        assert outcomes[0] == outcomes[1]
    else:
        assert all(map(torch.equal, *outcomes))


def test_functions_of_functions_and_fakes_do_not_reach_the_kernel() -> None:
    example = mla_write()
    direct, _ = both("concat_and_cache_mla", example)
    many = {key: value[None].clone() if key in ("ckv", "kpe") else value for key, value in example.items()}
    with pytest.raises(RuntimeError):  # no batching rule, as torch's dispatcher says
        torch.vmap(lambda ckv, kpe: direct(**dict(example, ckv=ckv, kpe=kpe)))(many["ckv"], many["kpe"])
    with torch._subclasses.FakeTensorMode() as mode:
        direct(**{key: mode.from_tensor(value) for key, value in example.items()})
    assert not example["ckv_cache"].any()


def test_a_gradient_that_is_wanted_is_told_of_by_torch() -> None:
    example = decode()
    direct, _ = both("paged_attention", example)
    for q in (example["q"].clone().requires_grad_(), torch.nn.Parameter(example["q"])):
        wanting = direct(**dict(example, q=q))[0]
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            wanting.sum().backward()
        with torch.no_grad(), Seen() as seen:
            assert not direct(**dict(example, q=q))[0].requires_grad
        assert not seen.ops


def test_a_call_that_is_wrong_is_told_as_the_op_tells_it() -> None:
    example = mla_write()
    direct, _ = both("concat_and_cache_mla", example)
    for wrong in (
        dict(kpe=torch.randn(3, 5)),
        dict(ckv=None),
        dict(slot_mapping=torch.arange(7)),
        dict(kv_format="fp9"),
    ):
        with pytest.raises(kvbackend.ArgumentError) as told:
            direct(**dict(example, **wrong))
        with pytest.raises(kvbackend.ArgumentError) as wanted:
            registry["concat_and_cache_mla"](**dict(example, **wrong))
        assert str(told.value) == str(wanted.value)
    with pytest.raises(kvbackend.UnsupportedError, match="made for other arguments"):
        direct(**dict(example, kpe_cache=example["kpe_cache"].bfloat16(), kpe=example["kpe"].bfloat16(),
                      ckv_cache=example["ckv_cache"].bfloat16(), ckv=example["ckv"].bfloat16()))  # fmt: skip
    assert not example["ckv_cache"].any()


def test_results_live_on_and_end() -> None:
    example = decode()
    direct, otherwise = both("paged_attention", example)
    expected = otherwise(**example)[0].clone()
    kept = [direct(**example)[0] for _ in range(50)]
    second = kept[1]
    del direct
    gc.collect()
    others = [torch.full_like(expected, 7.0) for _ in range(50)]
    assert all(torch.equal(made, expected) for made in kept)
    assert len({made.data_ptr() for made in kept + others}) == 100
    view = kept[0][1:]
    kept.clear()
    assert torch.equal(view, expected[1:])
    with pytest.raises(RuntimeError, match="not resizable"):
        second.resize_(100, 100)
    view.add_(1.0)
    assert torch.equal(view.clone(), expected[1:] + 1.0)


def test_memory_is_given_back() -> None:
    example = decode() | dict(q=torch.randn(2, 4, 16), return_lse=True)
    direct, _ = both("paged_attention", example)

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    for _ in range(2000):
        direct(**example)
    before = resident()
    for _ in range(20000):
        direct(**example)
    assert resident() - before < 256, "pages of 4 KiB: more than 50 bytes a call are left behind"


def test_threads_call_at_once() -> None:
    examples = [decode() for _ in range(4)]
    direct, otherwise = both("paged_attention", examples[0])
    expected = [otherwise(**example)[0] for example in examples]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(300):
            if not torch.equal(direct(**examples[i])[0], expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_says_what_it_is() -> None:
    direct, otherwise = both("paged_attention", decode())
    assert direct.backend == "cpu"
    assert direct.__name__ == "paged_attention"
    assert "resolve" in direct.__doc__
    assert direct.__doc__ == otherwise.__doc__
    with pytest.raises(AttributeError, match="nothing_of_it"):
        _ = direct.nothing_of_it
