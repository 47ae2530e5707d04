#!/usr/bin/env bash
# Optional. Cross-compile the CPU kernels for aarch64, as most Ascend hosts are, and run every contract sample on them
# under qemu-user, against the reference: values, not speed. Half an hour on two cores. On 2026-11-30 all passed, 93 tests.
#
#   ci/aarch64_check.sh                        every sample of every op
#   ci/aarch64_check.sh tests/test_contract.py -k "every_sample and transcode and cpu"     instead: other arguments for pytest
#
# Needs Debian's g++-aarch64-linux-gnu and qemu-user-static. Python for arm64 comes from this machine's apt sources, torch
# from its pip index, into build/aarch64; nothing is installed. A test that starts another process cannot run there.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.10.0 # the last whose wheel for aarch64 needs no CUDA; the kernels need no newer one
for tool in aarch64-linux-gnu-g++ qemu-aarch64-static apt-get dpkg-deb; do
    if ! command -v "$tool" >/dev/null; then
        echo "skipped: there is no $tool here: apt-get install g++-aarch64-linux-gnu qemu-user-static"
        exit 0
    fi
done
python="$(realpath -s "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}")"
work="$PWD/build/aarch64" root="$PWD/build/aarch64/root" site="$PWD/build/aarch64/site-$torch"

if [ ! -f "$root/.done" ]; then
    rm -rf "$root" "$work/apt"
    mkdir -p "$root" "$work"/apt/{lists,archives}/partial
    : >"$work/apt/status" # as if nothing were installed: all that Python stands on comes along
    apt() {
        apt-get -qq --yes -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
            -o Dir::State::lists="$work/apt/lists" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt" "$@"
    }
    apt update
    apt --no-install-recommends --download-only install python3 libstdc++6 libgomp1
    for package in "$work"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
    touch "$root/.done"
fi
emulated() { # emulated ARGUMENTS...: the Python of that root
    qemu-aarch64-static -L "$root" -E PYTHONPATH="$work/tree:$site" -E OMP_NUM_THREADS=1 "$root"/usr/bin/python3.?? "$@"
}
if [ ! -f "$site/.done" ]; then
    rm -rf "$site"
    "$python" -m pip install --quiet --no-deps --target "$site" --only-binary=:all: \
        --constraint <(grep -v ^torch ci/constraints.txt) \
        --python-version "$(emulated -c 'import sys; print("%d.%d" % sys.version_info[:2])')" --implementation cp \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
        "torch==$torch" filelock fsspec jinja2 markupsafe mpmath networkx sympy typing-extensions numpy \
        pytest iniconfig packaging pluggy pygments pytest-timeout hypothesis sortedcontainers
    touch "$site/.done"
fi

# a copy of the tree, so that the library of the tree stays; objects of an earlier run are kept
mkdir -p "$work/tree"
find "$work/tree" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git ls-files -z | tar --null --files-from=- --create | tar --extract --directory "$work/tree"
[ $# -gt 0 ] || set -- tests/test_contract.py -k "test_every_sample_equals_the_reference and cpu"
cd "$work/tree"
CXX=aarch64-linux-gnu-g++ KVBACKEND_BUILD_TORCH="$site/torch" "$python" setup.py --quiet build_ext --inplace
emulated -c "
import platform, torch
from kvbackend import native
found = native.library('cpu')
print(platform.machine(), 'Python', platform.python_version(), 'torch', torch.__version__, 'kernels:', found.isa or found.reason)
raise SystemExit(bool(found.reason))"
emulated -m pytest -q -p no:cacheprovider -o timeout=0 "$@" # emulated, a test may take long
