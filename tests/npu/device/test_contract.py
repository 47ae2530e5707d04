"""Rung 3: the ops on `npu:0`, through dispatch and the real torch_npu, over a strict fake of the operator library."""

from __future__ import annotations

import pytest
import torch

import kvbackend
from kvbackend.backends.npu import cann_ops, target
from kvbackend.matrix import copy_arguments, flat_results
from kvbackend.ops import registry
from tests.npu import cases, judge
from tests.npu.device.moving import ON_HOST, moved
from tests.npu.test_calls import takes_some
from tests.npu.test_limits import REFUSED_OPTIONS

EVERY_OP = pytest.mark.parametrize("op", judge.ADAPTED)


def test_the_fake_machine_is_the_one_that_was_asked_for() -> None:
    assert not judge.NPU.missing()
    assert target.found().target is not None


@pytest.mark.parametrize("dtype", judge.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@EVERY_OP
def test_accepted_calls_equal_the_reference_and_others_call_nothing(op, dtype, fake_npu) -> None:
    taken = 0
    for name, args in cases.every(op, dtype):
        on_host = registry[op].bind((), copy_arguments(args))
        on_device = moved(on_host, "npu:0", ON_HOST.get(op, ()))
        refused = judge.reasons(op, args)
        fake_npu.calls.clear()
        with kvbackend.use("npu", ops=op):
            if refused:
                with pytest.raises(kvbackend.UnsupportedError):
                    registry[op](**on_device)
                assert not fake_npu.calls, name
                continue
            result = registry[op](**on_device)
        taken += 1
        got = {key: value.cpu() for key, value in flat_results(registry[op], result, on_device).items()}
        assert not fake_npu.problems, (name, fake_npu.problems)
        assert not judge.faults(op, args, got), name
        for key, value in on_device.items():  # nothing else was written
            if isinstance(value, torch.Tensor) and key not in registry[op].mutates:
                assert torch.equal(as_bytes(value.cpu()), as_bytes(on_host[key])), (name, key)
    assert bool(taken) == takes_some(op, dtype, target.current().family)


@pytest.mark.parametrize("op", sorted(set(registry) - set(judge.ADAPTED)))
def test_references_of_the_other_ops_run_on_the_device(op, fake_npu) -> None:
    """What is said of them: plain torch ops, all of which torch_npu has, and no tensor of the host among them."""
    for name, args in cases.every(op, torch.bfloat16):
        on_device = moved(registry[op].bind((), copy_arguments(args)), "npu:0")
        with kvbackend.use("reference", ops=op):
            result = registry[op](**on_device)
        results = flat_results(registry[op], result, on_device)
        assert {tensor.device.type for tensor in results.values()} <= {"npu"}, name
        assert not fake_npu.problems, (name, fake_npu.problems)
        got = {key: value.cpu() for key, value in results.items()}
        assert not judge.faults(op, args, got), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


@pytest.mark.parametrize(
    ("op", "words", "call"), REFUSED_OPTIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refused_options_reach_no_operator(op, words, call, fake_npu) -> None:
    args = moved(registry[op].bind((), call()), "npu:0")
    fake_npu.calls.clear()
    with kvbackend.use("npu", ops=op), pytest.raises(kvbackend.UnsupportedError):
        registry[op](**args)
    assert not fake_npu.calls


@EVERY_OP
def test_compiles_on_npu_tensors(op, fake_npu) -> None:
    """torch.compile keeps each op as one node and runs it on the device."""
    taken = [args for _, args in cases.every(op, torch.bfloat16) if not judge.reasons(op, args)]
    if not taken:
        pytest.skip("; ".join(judge.reasons(op, getattr(cases, op)())))
    torch._dynamo.reset()
    args = registry[op].bind((), taken[0])
    on_device = moved(args, "npu:0", ON_HOST.get(op, ()))
    compiled = torch.compile(lambda call: registry[op](**call), fullgraph=True, backend="aot_eager")
    with kvbackend.use("npu", ops=op):
        result = compiled(on_device)
    got = {key: value.cpu() for key, value in flat_results(registry[op], result, on_device).items()}
    assert not judge.faults(op, taken[0], got)


def test_operators_of_canns_package_are_looked_up_in_its_libraries() -> None:
    """As the package's wrappers do it; a name that no library exports is a reason before the call."""
    assert cann_ops.exporting("aclnnSparseFlashMla") == "libopapi.so"
    assert cann_ops.exporting("aclnnNobodyHasThis") is None
    (reason,) = cann_ops.missing("sparse_flash_mla", ("aclnnNobodyHasThis", "aclnnSparseFlashMla"))
    assert reason.startswith("aclnnNobodyHasThis is in none of libcust_opapi.so, libopapi_transformer.so, libopapi.so;")


def test_a_limit_that_slips_through_is_an_error_of_the_operator(fake_npu) -> None:
    """The fake is strict: past the predicate, torch_npu raises what a device would."""
    args = moved(registry["mla_attention"].bind((), cases.mla_attention(mla_block_size=24)), "npu:0")
    with pytest.raises(RuntimeError, match="161002"):
        judge.NPU.adapter("mla_attention").run(**args)
    assert any("mla_block_size is 24" in problem for problem in fake_npu.problems)
