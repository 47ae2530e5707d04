#!/usr/bin/env bash
# Run the tests of the AMX kernels on a CPU without AMX: the same code, over tiles that are arrays in memory.
# Builds in a copy of the tree, so that the library of the tree keeps its real tiles. Optional: ten minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

python="$(realpath -s "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}")"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
git ls-files -z | tar --null --files-from=- --create | tar --extract --directory "$copy"
cd "$copy"
export KVBACKEND_EMULATE_TILES=1 PYTHONPATH="$copy" OMP_NUM_THREADS=1
"$python" setup.py --quiet build_ext --inplace
"$python" -c "
from kvbackend import native
isa = native.library('cpu').isa
print('kernels:', isa)
raise SystemExit(isa != 'amx' and 'this CPU has no AVX-512 either, which the AMX kernels need')"
"$python" -m pytest -q -p no:cacheprovider tests/cpu tests/test_contract.py -k "not plain and not avx" "$@"
