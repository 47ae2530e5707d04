"""A plan's allocated bytes are those of the real pools, to the byte."""

from __future__ import annotations

import pytest
import torch

from kvbackend.cache import PagedCache
from kvbackend.cache.layers import GqaLayer, MlaLayer
from kvbackend.planner import Plan, plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pool(made: Plan, num_blocks: int, dtype: str, layout: str = "NHD", devices: int = 1) -> PagedCache:
    """The cache that the plan speaks of, on one of `devices` tensor-parallel devices."""
    layers: list[GqaLayer | MlaLayer] = []
    for layer in made.model.on_one_of(devices).layers:
        (rows,) = layer.keeps
        first, second = rows.vectors
        if rows.holds == "mla":
            layers.append(MlaLayer(first.dim, second.dim))
        else:
            layers.append(GqaLayer(first.heads, first.dim, second.dim))
    return PagedCache(layers, num_blocks, made.cache.block_size, DTYPES[dtype], layout=layout)


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 61])
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3-8b", "deepseek-v2-lite"])
def test_pools(model: str, block_size: int, dtype: str, layout: str) -> None:
    made = plan(model, kv_format=dtype, block_size=block_size)
    cache = pool(made, 3, dtype, layout)
    assert cache.allocated_bytes == made.cache.pool_bytes(3) == 3 * block_size * made.allocated_bytes_per_token


def test_pools_of_one_tensor_parallel_device() -> None:
    for devices, heads in ((1, 8), (4, 2), (16, 1)):
        made = plan("llama-3-8b", tensor_parallel=devices)
        cache = pool(made, 2, "bf16", devices=devices)
        assert cache.allocated_bytes == made.stages[0].cache.pool_bytes(2)
        assert cache.allocated_bytes == 2 * 16 * 32 * heads * 128 * 2 * 2


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("model", ["smollm2-135m", "deepseek-v2-lite"])
def test_a_sequence_takes_the_blocks_that_were_planned(model: str, tokens: int) -> None:
    made = plan(model, block_size=16)
    cache = pool(made, 8, "bf16")
    cache.append(cache.new_sequence(), tokens)
    assert cache.blocks_used * cache.block_bytes == made.allocated_bytes_at(tokens)
    assert cache.used_bytes == made.bytes_at(tokens)


def test_as_many_sequences_fit_as_were_planned() -> None:
    made = plan("smollm2-135m", memory="1GiB", margin=0, activations=0, context=5000)
    cache = PagedCache.with_memory(made.stages[0].available_bytes, [GqaLayer(3, 64)] * 30, 16, torch.bfloat16)
    each = -(-5000 // 16)
    assert cache.blocks_total // each == made.max_sequences
