#!/usr/bin/env bash
# Compile csrc/cuda for every GPU generation that this machine's nvcc knows, without a GPU and without linking: no kernel
# spills or keeps anything on a stack, and the table of docs/cuda.md is as it is. --write writes that table.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v "${NVCC:-nvcc}" >/dev/null; then
  echo "csrc/cuda is not compiled here: there is no nvcc on the path, and NVCC names none"
  exit 0
fi
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
nice "$python" setup.py --quiet build_cuda 2>"$log" || { cat "$log"; exit 1; }
"$python" -m tests.cuda.resources "$log" "$@"
