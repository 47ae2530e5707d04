#!/usr/bin/env bash
# Build the wheel and the source archive into dist/, each twice in two places, which must give the same bytes; then
# install that one wheel into a bare environment for each torch and see that its CPU kernels run there.
#
#   ci/wheel_check.sh                      the torch of ci/constraints.txt
#   ci/wheel_check.sh 2.10.0 2.14.1        others; from an index with CUDA builds only, 6 GB each
#   ci/wheel_check.sh --once [TORCH...]    no second wheel, which compiles everything again: minutes less
#
# Needs what builds kvbackend (`make setup`) and git. Environments stay in build/wheel for the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

python="$(realpath -s "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}")"
once=
[ "${1:-}" = --once ] && { once=1; shift; }
[ $# -gt 0 ] || set -- "$(sed -n 's/^torch==//p' ci/constraints.txt)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
export SOURCE_DATE_EPOCH OMP_NUM_THREADS=1

archive() { # archive NAME: the source archive of a fresh copy of the tracked files
    mkdir -p "$work/$1/tree"
    git ls-files -z | tar --null --files-from=- --create | tar --extract --touch --directory "$work/$1/tree"
    (cd "$work/$1/tree" && "$python" -c "from setuptools import build_meta; build_meta.build_sdist('..')" >"../log" 2>&1) ||
        { cat "$work/$1/log" >&2; return 1; }
}
wheel() { # wheel TREE FOLDER
    (cd "$1" && "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$2" .)
}
same() { # same FILE FILE
    cmp "$1" "$2" || { echo "$(basename "$1"): two builds differ" >&2; exit 1; }
    (cd "$(dirname "$1")" && sha256sum "$(basename "$1")")
}

rm -rf dist && mkdir dist
archive one
archive another
cp "$work"/one/*.tar.gz dist/
same dist/*.tar.gz "$work"/another/*.tar.gz
mkdir "$work/unpacked"
tar --extract --file dist/*.tar.gz --directory "$work/unpacked" --strip-components 1
# whatever is tracked is there, but for what only the repository's host and git read
(cd "$work/unpacked" && git -C "$OLDPWD" ls-files | grep -v '^\.' | xargs ls -d >/dev/null)

wheel . "$PWD/dist"
if [ ! "$once" ]; then
    wheel "$work/unpacked" "$work"
    same dist/*.whl "$work"/*.whl
fi
"$python" -m zipfile --extract dist/*.whl "$work/installed"
[ -f "$work/installed/kvbackend/_lib/libkvbackend_cpu.so" ] || { echo "the CPU kernels were not built" >&2; exit 1; }
if grep --recursive --files-with-matches --fixed-strings -e "$PWD" -e "$work" -e site-packages/torch "$work/installed"; then
    echo "these files of the wheel name folders of this machine" >&2
    exit 1
fi

mkdir "$work/elsewhere"
wheel="$(realpath dist/*.whl)" ops="$(cd csrc/cpu && ls -- *.cpp | sed 's/\.cpp//')" probe="$(realpath ci/wheel_probe.py)"
for version; do
    venv="$PWD/build/wheel/torch-$version"
    if [ ! -f "$venv/.done" ]; then
        rm -rf "$venv"
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet "torch==$version"
        touch "$venv/.done"
    fi
    "$venv/bin/python" -m pip install --quiet "$wheel" # brings what the wheel asks for
    "$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
    (
        cd "$work/elsewhere"
        unset PYTHONPATH
        "$venv/bin/kvbackend" doctor
        "$venv/bin/python" "$probe" $ops
        "$venv/bin/kvbackend" matrix --quick
    )
done
