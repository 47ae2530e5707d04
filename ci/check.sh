#!/usr/bin/env bash
# Lint, format and types: what must hold before a commit. `make check` brings the tools (ci/lint.txt); here those that
# are installed run, and the others are named.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

check() { # check TOOL ARGUMENTS...
    if command -v "$1" >/dev/null; then
        "$@"
    else
        echo "$1 is not installed: what it checks is not checked" >&2
    fi
}
files() { # the tracked files of these patterns that are there
    git ls-files -- "$@" | while read -r file; do [ -f "$file" ] && echo "$file"; done
}

check ruff check .
check ruff format --check .
mapfile -t sources < <(files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp' 'tests/*.h')
check clang-format --dry-run --Werror "${sources[@]}"
mapfile -t scripts < <(files '*.sh' .ci/run)
check shellcheck --severity warning "${scripts[@]}"
check hadolint docker/Dockerfile.*
check mypy
