#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes wheels in folder $2: lamina's, from the engine in build folder $1, for the Python and the torch of the
# environment, and that of the names that other scripts import (lamina-compat). Wheels of lamina that follow, for other
# torches, become a part of it. Its name says which systems take it. Libraries that are not looked into are its own,
# torch's, and the UCX that lies in it (cmake/LaminaInstall.cmake).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build=$1 out=$2
shift 2
mkdir -p "$out"
made=$(mktemp -d -p "$out")
trap 'rm -rf "$made"' EXIT

pip_wheel() {
  "$venv/bin/python" -m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps --no-index "$@" </dev/null
}

pip_wheel -C build-dir="$build" -C cmake.build-type=Release -w "$made" .
pip_wheel -w "$out" ./python/compat
PATH=$PWD/$venv/bin:$PATH "$venv/bin/auditwheel" repair --exclude 'liblamina*' --exclude 'libc10*' --exclude 'libtorch*' \
  --exclude 'libuc*' --exclude 'libnuma*' -w "$made/repaired" "$made"/lamina-*.whl
"$venv/bin/python" scripts/merge_wheels.py "$out" "$made"/repaired/lamina-*.whl "$@"
