#!/usr/bin/env bash
# Execute docker/Dockerfile.cpu to its CMD, the doctor: by docker where its daemon runs, else instruction by instruction
# in scratch roots (ci/dockerfile.py), which needs root and debootstrap. There Debian's base system with its Python stands
# for the image; apt and pip reach what this machine's own configuration names.
#
#   ci/docker_check.sh [NAME=VALUE...]     build arguments; TORCH_INDEX= where pip has CPU builds of torch already
set -euo pipefail
cd "$(dirname "$0")/.."

if docker info >/dev/null 2>&1; then
    docker build --file docker/Dockerfile.cpu --tag kvbackend:cpu "${@/#/--build-arg=}" .
    exec docker run --rm kvbackend:cpu
fi
[ "$(id -u)" = 0 ] || { echo "skipped: no docker daemon runs here, and without root there is no chroot either"; exit 0; }
command -v debootstrap >/dev/null || { echo "skipped: no docker daemon runs here, and there is no debootstrap: apt-get install debootstrap"; exit 0; }

release="$(sed -n 's/^FROM python:.*-slim-\(\w*\)$/\1/p' docker/Dockerfile.cpu)"
python="$(sed -n 's/^ARG PYTHON=//p' docker/Dockerfile.cpu)"
base="$PWD/build/docker/base-$release" work="$(mktemp -d -p "$(mkdir -p build/docker && realpath build/docker)")"
trap 'rm -rf "$work"' EXIT
if [ ! -f "$base/.done" ]; then
    rm -rf "$base"
    site="$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' "Codename: $release" | head -n 1)"
    debootstrap --variant=minbase --include=python3,python3-pip,python3-dev,ca-certificates "$release" "$base" \
        ${site:+"$site"} >"$work/log" || { tail "$work/log"; exit 1; }
    rm -f "$base"/usr/lib/python3*/EXTERNALLY-MANAGED # the image's pip owns its Python
    rm -rf "$base/etc/apt" && cp --archive /etc/apt "$base/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$base/etc/ssl/certs/"
    for file in /etc/pip.conf /etc/xdg/pip; do
        [ ! -e "$file" ] || { mkdir -p "$base$(dirname "$file")" && cp --archive "$file" "$base$file"; }
    done
    touch "$base/.done"
fi
chroot "$base" python3 -c "import sys; assert '%d.%d' % sys.version_info[:2] == '$python', sys.version"
# folders of wheels and of index pages on this disk
BIND="$( (python3 -m pip config list 2>/dev/null; echo "'${PIP_FIND_LINKS:-}'") | grep --only-matching '/[^/:'"' ]*/[^'"' ]*' | sort --unique |
    while read -r folder; do [ ! -d "$folder" ] || echo "$folder"; done)"
export BIND
python3 ci/dockerfile.py docker/Dockerfile.cpu "$base" "$work" "$@"
