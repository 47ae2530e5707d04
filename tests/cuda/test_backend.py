"""The backend where its library is not built, and the scripts that build it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from kvbackend import backends, native
from kvbackend.backends.cuda import missing
from kvbackend.ops import registry
from tests.cuda import resources

ROOT = Path(__file__).parents[2]


def reasons(op: str, **change) -> list[str]:
    args = next(iter(dict(registry[op].make_samples("meta", torch.bfloat16)).values())) | change
    seen = registry[op].dispatcher.views(registry[op].bind((), args))
    return list(backends.registered()["cuda"].adapter(op).unsupported(**seen))


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build: the library may be there")
def test_the_backend_says_what_builds_it() -> None:
    (reason,) = missing()
    assert "libkvbackend_cuda.so is missing; nvcc and a CUDA build of torch make them: run `pip install" in reason


def test_asked_before_triton() -> None:
    order = [backend.name for backend in backends.serving("cuda")]
    assert order.index("cuda") < order.index("cuda_triton")


def test_a_library_of_another_schema_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(native, "library", lambda device: native.DeviceLibrary({"copy_blocks": "copy_blocks() -> ()"}))
    assert "built for another version of copy_blocks" in reasons("copy_blocks")[0]
    assert "built without swap_blocks" in reasons("swap_blocks")[0]


def test_pages_that_the_kernels_cannot_walk_are_refused() -> None:
    pool = torch.empty(2, 3, 4, 5, 6, 7, device="meta")
    assert any("cache has 6 dims" in reason for reason in reasons("copy_blocks", cache=pool))
    pages = torch.empty(4, 2 * 3280, dtype=torch.uint8, device="meta")[:, ::2]
    args = dict(pages=pages, from_layout="v32_fp8_656", to_layout="v32_fp8_656_ascend", block_size=5)
    assert any("pages has bytes 2 apart" in reason for reason in reasons("transcode", **args))


def test_without_nvcc_the_build_is_skipped_with_a_reason() -> None:
    done = subprocess.run(
        [ROOT / "ci" / "cuda_build.sh"], capture_output=True, text=True, env={**os.environ, "NVCC": "/nowhere/nvcc"}
    )
    assert done.returncode == 0
    assert done.stdout == "csrc/cuda is not compiled here: there is no nvcc on the path, and NVCC names none\n"


LOG = """ptxas info    : Compiling entry function '_ZN9kvbackend4cuda10copy_pagesI5uint4NS0_11DevicePairsEEEvPKT_PS4_T0_NS0_8GeometryE' for 'sm_90'
ptxas info    : Function properties for it
    {} bytes stack frame, {} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers
"""  # noqa: E501


@pytest.mark.parametrize(("stack", "spilled", "code"), [(0, 0, 0), (112, 0, 1), (0, 8, 1)])
def test_a_kernel_that_spills_fails_the_build(stack, spilled, code, tmp_path, monkeypatch) -> None:
    page, log = tmp_path / "page.md", tmp_path / "log"
    page.write_text(f"before\n\n{resources.MARK}\n\n## After\n")
    log.write_text(LOG.format(stack, spilled))
    monkeypatch.setattr(resources, "PAGE", page)
    assert resources.main([str(log)]) == 1  # another table
    assert resources.main([str(log), "--write"]) == code
    assert resources.main([str(log)]) == code
    table = "| kernel | sm_90 |\n|---|---|\n| `copy_pages<uint4, DevicePairs>` | 38 |\n"
    assert page.read_text() == f"before\n\n{resources.MARK}\n{table}\n## After\n"
