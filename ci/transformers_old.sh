#!/usr/bin/env bash
# Run the transformers integration's tests against the oldest release line that is supported.
# The release is put into a folder of its own, in front of the installed one: nothing else is installed or changed.
set -euo pipefail
cd "$(dirname "$0")/.."

version="${1:-5.19.0}"
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
target="build/transformers-$version"

if [ ! -d "$target" ]; then
    partial="$(mktemp -d -p "$(mkdir -p build && echo build)")"
    trap 'rm -rf "$partial"' EXIT
    "$python" -m pip install --quiet --no-deps --target "$partial" "transformers==$version"
    mv "$partial" "$target"
fi
export PYTHONPATH="$PWD/$target:$PWD${PYTHONPATH:+:$PYTHONPATH}"
found="$("$python" -c 'import transformers; print(transformers.__version__)')"
[ "$found" = "$version" ] || { echo "transformers is $found, not $version: is $target whole?" >&2; exit 1; }
echo "transformers $found"
exec env OMP_NUM_THREADS=1 "$python" -m pytest --numprocesses auto -q tests/integrations "${@:2}"
