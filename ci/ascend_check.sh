#!/usr/bin/env bash
# For a machine with an Ascend NPU: one command that runs the backend on it and prints what to report.
#
#   ci/ascend_check.sh            an environment with torch, torch_npu and CANN's set_env.sh sourced
#   ci/ascend_check.sh --limits   calls just past the documented limits instead: what does CANN refuse?
#   ci/ascend_check.sh --dry      either over the fake CANN of ci/npu_check.sh, to try the check itself
#
# Writes $OUT/matrix.json (default: build/ascend_check) for `kvbackend matrix merge`, which refuses those of a fake.
set -euo pipefail
cd "$(dirname "$0")/.."
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
python="${PYTHON:-python3}" OUT="${OUT:-build/ascend_check}"
mkdir -p "$OUT"
set -- "$@" --json "$OUT/matrix.json"

if [ "${1:-}" = --dry ]; then
    shift
    export TASK_QUEUE_ENABLE=0 LD_LIBRARY_PATH="$PWD/build/npu-stubs" ASCEND_STUB_SOC="${ASCEND_STUB_SOC:-Ascend950PR_9599}"
    [ -f "$LD_LIBRARY_PATH/libopapi.so" ] || { echo "run ci/npu_check.sh first: it builds the fake CANN" >&2; exit 1; }
    exec build/npu/bin/python -m tests.npu.device.check --fake "$@"
fi
"$python" -m kvbackend doctor || true # it says what is wrong; the check goes on as far as it can
"$python" setup.py --quiet build_npu || true
exec "$python" -m tests.npu.device.check "$@"
