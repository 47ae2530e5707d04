"""Write the Dockerfiles, with the versions that the compatibility matrix and ci/constraints.txt name.

    python docker/generate.py

A test compares the files with what this would write. The wheel is built in a stage of its own against a CPU build of
torch, in every file alike: it is linked to libtorch's stable ABI, so it serves whatever torch the last stage has.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvbackend.compat import rules, versions
from kvbackend.compat.data import Matrix, load_matrix

HERE = Path(__file__).parent
PYTHON = "3.11"

BUILD = """\
# {title} Written by docker/generate.py. From the top of the source tree:
#   docker build -f docker/Dockerfile.{name} -t kvbackend:{name} .
ARG PYTHON={python}
{arguments}
FROM python:${{PYTHON}}-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=${{TORCH_INDEX}} PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip install --constraint ci/constraints.txt torch numpy setuptools pybind11 \\
    && pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .
"""

CPU = """
FROM python:${{PYTHON}}-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=${{TORCH_INDEX}} PIP_NO_CACHE_DIR=1
COPY --from=build /wheels /wheels
RUN pip install torch=={torch} /wheels/*.whl rich && rm -rf /wheels
CMD ["kvbackend", "doctor"]
"""

# torch's wheels bring CUDA's libraries; the driver is the host's. Triton compiles its launchers with gcc.
CUDA = """
# CUDA {cuda} comes with torch; the host's driver must be {driver} or newer.
FROM python:${{PYTHON}}-slim-bookworm
ENV PIP_NO_CACHE_DIR=1 CC=gcc
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install torch=={torch} triton=={triton} /wheels/*.whl rich && rm -rf /wheels
CMD ["kvbackend", "doctor"]
"""

ASCEND = """
# torch_npu {torch_npu} is of TorchNPU {product}, for CANN {cann}; the host's driver and its devices are mounted.
# hadolint ignore=DL3006
FROM ${{CANN_IMAGE}}:${{CANN_TAG}}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=${{TORCH_INDEX}} PIP_NO_CACHE_DIR=1
COPY --from=build /wheels /wheels
RUN pip install torch=={torch} torch_npu=={torch_npu} numpy pyyaml /wheels/*.whl rich && rm -rf /wheels \\
    && python3 -c "import torch; assert not torch.version.cuda, 'torch_npu needs a CPU build of torch'"
COPY docker/with_cann.sh /usr/local/bin/with_cann
ENTRYPOINT ["with_cann"]
CMD ["kvbackend", "doctor"]
"""

SOC = """\
# The chip in the tags of the CANN images: 910b (A2), a3 or 950
ARG SOC=950
ARG CANN_IMAGE=quay.io/ascend/cann
ARG CANN_TAG={cann}-${{SOC}}-ubuntu22.04-py${{PYTHON}}
"""


def dockerfiles(matrix: Matrix) -> dict[str, str]:
    """File name -> text."""
    torch = pinned_torch()
    python = matrix.row("python_torch", torch)
    assert PYTHON in (python or {"python": []})["python"], f"no row says that torch {torch} serves Python {PYTHON}"
    cuda = matrix.row("torch_cuda", torch)
    assert cuda, f"no row says which CUDA torch {torch} comes with"
    driver = matrix.row("cuda_driver", cuda["cuda"].partition(".")[0])
    assert driver
    npu = newest_torch_npu(matrix)
    assert PYTHON in (matrix.row("python_torch", npu["torch"]) or {"python": []})["python"]
    versions_of = {
        "cpu": dict(torch=torch),
        "cuda": dict(torch=torch, cuda=cuda["cuda"], triton=cuda["triton"], driver=driver["driver_min"]),
        "ascend": npu,
    }
    titles = {
        "cpu": "kvbackend for CPUs.",
        "cuda": "kvbackend for NVIDIA GPUs.",
        "ascend": "kvbackend for Ascend NPUs.",
    }
    found = {}
    for name, last in (("cpu", CPU), ("cuda", CUDA), ("ascend", ASCEND)):
        arguments = SOC.format(**npu) if name == "ascend" else ""
        head = BUILD.format(title=titles[name], name=name, python=PYTHON, arguments=arguments)
        found[f"Dockerfile.{name}"] = head + last.format(**versions_of[name])
    return found


def pinned_torch() -> str:
    """The torch that CI tests with."""
    text = (HERE.parent / "ci" / "constraints.txt").read_text()
    found = re.search(r"^torch==(\S+)$", text, re.M)
    assert found, "ci/constraints.txt pins no torch"
    return found[1]


def newest_torch_npu(matrix: Matrix) -> dict[str, str]:
    """The newest torch_npu of a released product, and the newest CANN that the vendor names for it."""
    rows = [row for row in matrix.rows("torch_npu") if row["product"] and row["cann"] and "-" not in row["product"]]
    row = max(rows, key=lambda row: versions.parse(row["torch_npu"]))
    exact = {other["cann"] for other in rows if isinstance(other["cann"], str) and "X" not in other["cann"]}
    fitting = [cann for cann in exact if rules.torch_npu_cann(row["torch_npu"], cann, matrix).state == "ok"]
    cann = max(fitting, key=versions.parse)
    return {name: row[name] for name in ("torch", "torch_npu", "product")} | {"cann": cann}


if __name__ == "__main__":
    for name, text in dockerfiles(load_matrix()).items():
        (HERE / name).write_text(text)
