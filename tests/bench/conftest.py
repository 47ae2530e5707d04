"""Benchmarks shrunk to what a test can run."""

from __future__ import annotations

import pytest

from kvbackend import backends
from kvbackend.bench import attention, caches, codes, limits, sparse

if why := backends.registered()["cpu"].missing():
    pytest.skip("; ".join(why), allow_module_level=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POOL_BYTES", 1 << 24)
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(attention, "POOL_BYTES", 1 << 23)
    monkeypatch.setattr(attention, "PREFILL", (48,))
    monkeypatch.setattr(caches, "SLOTS", 1 << 12)
    monkeypatch.setattr(caches, "TOKENS", (1, 64))
    monkeypatch.setattr(caches, "POOLED", 256)
    monkeypatch.setattr(codes, "TOKENS", 128)
    monkeypatch.setattr(sparse, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(sparse, "CONTEXTS", (512, 640))
    monkeypatch.setattr(sparse, "TOPK", 128)
