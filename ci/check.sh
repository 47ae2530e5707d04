#!/usr/bin/env bash
# Lint, format and types: what must hold before a commit. Tools: `pip install ruff==0.17.6 clang-format==23.1.5 mypy`.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

ruff check .
ruff format --check .
if command -v clang-format >/dev/null; then
  git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp' 'tests/*.h' | xargs clang-format --dry-run --Werror
else
  echo "clang-format is not installed: C++ layout not checked"
fi
if command -v mypy >/dev/null; then
  mypy
else
  echo "mypy is not installed: types not checked"
fi
