#!/usr/bin/env bash
# Check the Triton kernels for Ascend 950 without an NPU: compiled by triton-ascend and ascendnpu-ir to optimised HIVM,
# for two chips, within their memories; interpreted on contract samples; the table of docs/ascend.md as it is. --write
# writes that table. A virtual environment of its own in build/npu-triton: triton-ascend and triton own one folder.
set -euo pipefail
cd "$(dirname "$0")/.."
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1

torch=2.13.0 triton=3.2.0 ir=1.2.0
venv=build/npu-triton done=build/npu-triton/.done-$torch-$triton-$ir
if [ ! -f "$done" ]; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    pip() { "$venv/bin/python" -m pip "$@"; }
    if ! said="$(pip install --quiet --no-deps "triton-ascend==$triton" "ascendnpu-ir==$ir" 2>&1)"; then
        reason="$(grep '^ERROR: No matching distribution' <<<"$said")" || { echo "$said" >&2; exit 1; }
        echo "skipped: $(pip --version) finds no wheel of triton-ascend $triton and ascendnpu-ir $ir here: $reason"
        rm -rf "$venv"
        exit 0
    fi
    # numpy: triton-ascend's interpreter makes integers of arrays of one element, which 2.4 refuses
    pip install --quiet "torch==$torch" 'numpy<2.4' pybind11
    touch "$done"
fi
exec "$venv/bin/python" -m tests.npu_triton.check "$@"
