#!/usr/bin/env bash
# Run the tests of kernels whose instructions this CPU lacks: AMX's over tiles that are arrays in memory, and without
# AVX-512-BF16, VBMI and GFNI those of all AVX-512 variants, lane by lane (csrc/cpu/emulated_avx512.h). Builds in a copy of the
# tree, so that the library of the tree keeps the real ones. Optional: ten minutes on two cores, else half an hour.
set -euo pipefail
cd "$(dirname "$0")/.."

python="$(realpath -s "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}")"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
git ls-files -z | tar --null --files-from=- --create | tar --extract --directory "$copy"
cd "$copy"
export PYTHONPATH="$copy" OMP_NUM_THREADS=1
export KVBACKEND_EMULATE=avx512
[ "$(grep -m 1 ^flags /proc/cpuinfo | grep -owE 'avx512_bf16|avx512vbmi|gfni' | wc -l)" = 3 ] && KVBACKEND_EMULATE=tiles
"$python" setup.py --quiet build_ext --inplace
for isa in avx512 avx512_bf16 amx; do
  [ "$KVBACKEND_EMULATE" = avx512 ] || [ $isa = amx ] || continue
  export KVBACKEND_CPU_ISA=$isa
  "$python" -c "
from kvbackend import native
isa = native.library('cpu').isa
print('kernels:', isa, '($KVBACKEND_EMULATE emulated)')
raise SystemExit(isa != '$isa' and 'asked for $isa')"
  "$python" -m pytest -q -p no:cacheprovider tests/cpu tests/test_contract.py -k "not plain and not avx2" "$@"
done
