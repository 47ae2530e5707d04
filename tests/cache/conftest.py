"""The cache is tested through the kernels of this machine, and through the reference for ops that have none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvbackend
from kvbackend.ops import registry

USED = ("reshape_and_cache", "concat_and_cache_mla", "copy_blocks", "gather_cache", "paged_attention", "mla_attention")


@pytest.fixture(scope="module", autouse=True)
def _backends() -> Iterator[None]:
    def has_kernel(name: str) -> bool:
        _, example = next(registry[name].make_samples("cpu", torch.float32))
        return any(verdict.status == "chosen" for verdict in kvbackend.explain(name, **example).backends[:-1])

    without = [name for name in USED if not has_kernel(name)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: more threads would only wait for each other
    with kvbackend.use("reference", without):
        yield
    torch.set_num_threads(threads)
