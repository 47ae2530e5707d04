"""Every mistake of `mutations.py` fails some accepted call: a rung that no mistake could fail would prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbackend.backends.npu import fused_infer
from tests.doubles.torch_npu import SignatureError
from tests.npu import cases, judge, vendor
from tests.npu.mutations import MUTATIONS, CallMutation

NOTICED = (SignatureError, vendor.RejectedError, AttributeError, TypeError, IndexError, RuntimeError, ValueError)


def verdict(mutation, args) -> str:
    """How a call with the mistake is noticed; empty if it is not."""
    try:
        found = judge.faults(mutation.op, args, judge.run(mutation.op, args))
    except vendor.RejectedError:
        return "limit"
    except SignatureError:
        return "signature"
    except NOTICED as error:
        return type(error).__name__
    return "result" if found else ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.op}: {mutation.name}")
def test_mistake_is_noticed(mutation, become, monkeypatch) -> None:
    double = become("950DT")
    fused_infer._causal_mask.cache_clear()
    if isinstance(mutation, CallMutation):

        def mutate(name, args, kwargs):
            changed, named = list(args), dict(kwargs)
            if mutation.is_of(name):
                mutation.change(changed, named)
            return tuple(changed), named

        double.mutate = mutate
    else:
        monkeypatch.setattr(mutation.module, mutation.attribute, mutation.value)
    every = (args for _, args in cases.every(mutation.op, torch.bfloat16) if not judge.reasons(mutation.op, args))
    noticed = any(verdict(mutation, args) for args in every)
    fused_infer._causal_mask.cache_clear()
    assert noticed


def test_the_documented_list_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text()
    for mutation in MUTATIONS:
        assert f"| {mutation.op} | {mutation.name} |" in text
    assert f"{len(MUTATIONS)} mistakes" in text
