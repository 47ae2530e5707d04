"""Machine code of the Triton kernels without a GPU: what production calls launch, compiled for Hopper.

ci/cuda_compile.sh does the same for every target and writes docs/cuda.md's table.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvbackend import backends
from kvbackend.backends import nvidia
from kvbackend.backends.cuda_triton import attending
from kvbackend.backends.npu_triton import launching as ascend
from kvbackend.ops import registry

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from . import shapes
from .compiling import SHARED_LIMIT, build, faults, launches, samples

WITH_LAUNCHER = [name for name in registry if backends.registered()["cuda_triton"].adapter(name)]


@pytest.mark.parametrize("name", WITH_LAUNCHER)
def test_production_call_compiles_without_spills(name: str) -> None:
    every = dict(samples(name, torch.bfloat16))
    args = next((args for sample, args in every.items() if "production" in sample), next(iter(every.values())))
    found = launches(name, 90, **args)
    for launch in found:
        resources = build(launch, 90)
        assert not resources.spilled, launch.name
        assert resources.shared <= SHARED_LIMIT[90], launch.name


def test_tokens_with_positions_of_their_own_compile() -> None:
    """A tile of queries and a step of keys differ in size here. sm_120 spilled most."""
    for launch in launches("paged_attention", 120, **shapes.FULL.placed(512, 64))[:2]:
        assert not build(launch, 120).spilled


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(
    ("name", "case", "kv_format"),
    [
        ("mla_attention", "mla", "auto"), ("mla_attention", "mla", "fp8_e4m3"),
        ("sparse_mla_attention", "sparse_mla", "auto"),
    ],
)  # fmt: skip
def test_decode_of_many_heads_over_latents_is_products_of_a_warp_group(
    name: str, case: str, kv_format: str, heads: int
) -> None:
    call = getattr(shapes.Shapes(mla_heads=heads), case)(1, kv_format=kv_format)
    launch, _ = launches(name, 90, **call)
    found = build(launch, 90)
    assert "HGMMA" in found.sass
    assert not list(faults(launch, 90, found))


@pytest.mark.parametrize(
    ("capability", "heads", "on_an_npu", "rows"),
    [
        ((9, 0), 64, False, 64), ((10, 0), 128, False, 64), ((9, 0), 63, False, 16), ((8, 0), 128, False, 16),
        ((12, 0), 128, False, 16), ((9, 0), 128, True, 16),
    ],
)  # fmt: skip
def test_64_rows_over_latents_only_where_they_are_multiplied_at_once(
    capability: tuple[int, int], heads: int, on_an_npu: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "capability", lambda: capability)
    monkeypatch.setattr(ascend, "compiles", lambda: on_an_npu)
    for spare in (True, False):
        assert attending.latent_tiles(heads, torch.bfloat16, False, spare).block_m == rows


def test_a_launch_is_specialized_as_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones are constants, multiples of 16 are marked: else registers and widths of loads are those of other code."""
    cache = torch.empty(4, 16, 2, 64, dtype=torch.bfloat16, device="meta")
    pairs = torch.empty(3, 2, dtype=torch.int64, device="meta")
    (launch,) = launches("copy_blocks", 90, cache=cache, block_mapping=pairs)
    assert dict(launch.signature)["source"] == "*i16"
    assert dict(launch.signature)["page_size"] == "i32"
    assert dict(launch.constants)["side"] == 1
    names = launch.kernel.arg_names
    assert {"source", "source_block", "page_size"} <= {names[index] for index in launch.aligned}
    assert "pair" not in {names[index] for index in launch.aligned}
