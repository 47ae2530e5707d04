#!/usr/bin/env bash
# Compile the Triton kernels of calls of production size for every GPU generation, without a GPU: no spills, shared
# memory within limits, tensor cores in attention, and the table of docs/cuda.md as it is. --write writes that table.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
exec "$python" -m tests.cuda_triton.compiling "$@"
