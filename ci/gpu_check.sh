#!/usr/bin/env bash
# One run for a machine with one NVIDIA GPU and 8 minutes: installed providers and contract samples against the reference,
# graph capture, and times of the Triton kernels and of whatever else takes the call. Writes $OUT/gpu_check.json and, for
# `kvbackend matrix merge`, $OUT/matrix.json (default: build/gpu_check).
# --dry runs to its end on the CPU: kernels interpreted, tiny sizes, no graph, times that mean nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-build/gpu_check}"
mkdir -p "$OUT"
if [ "${1:-}" = --dry ]; then
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
fi
exec timeout 480 "$python" -W ignore -m tests.cuda_triton.gpu_check "$@"
