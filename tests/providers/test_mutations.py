"""Every mistake of `mutations.py` fails some accepted call: a double that no mistake could fail would prove nothing."""

from __future__ import annotations

import pytest
import torch

from kvbackend.backends import nvidia
from tests.doubles.library import RejectedError
from tests.providers import cases, judge
from tests.providers.mutations import MUTATIONS, CallMutation

NOTICED = (RejectedError, TypeError, AttributeError, IndexError, RuntimeError, ValueError, AssertionError)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.provider} {m.op}: {m.name}")
def test_mistake_is_noticed(mutation, become, monkeypatch) -> None:
    double = become(mutation.provider)
    if isinstance(mutation, CallMutation):
        double.mutate = lambda name, arguments: mutation.change(arguments) if name == mutation.function else None
    else:
        monkeypatch.setattr(mutation.module, mutation.attribute, mutation.value)
    for major in (9, 10):
        monkeypatch.setattr(nvidia, "capability", lambda major=major: (major, 0))
        for _, args in cases.of(mutation.provider, mutation.op, torch.bfloat16):
            if judge.reasons(mutation.provider, mutation.op, args):
                continue
            try:
                found = judge.faults(mutation.op, args, judge.run(mutation.provider, mutation.op, args))
            except NOTICED:
                return
            if found:
                return
    pytest.fail("no accepted call notices it")
