#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the engine in build folder $1 and installs the package, then `compat`, into the environment: what is compiled as a
# copy, the Python files by reference, so that an edit of one is live.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(scripts/jobs.sh)}
export CMAKE_BUILD_PARALLEL_LEVEL

pip_install() {
  "$venv/bin/python" -m pip --disable-pip-version-check install --no-build-isolation --no-deps --no-index \
    --force-reinstall "$@" </dev/null
}

if [[ -e $1/build.ninja ]]; then
  say "building with $CMAKE_BUILD_PARALLEL_LEVEL compilers at once (only what changed)"
else
  say "building with $CMAKE_BUILD_PARALLEL_LEVEL compilers at once: from nothing some $((28 / CMAKE_BUILD_PARALLEL_LEVEL)) minutes"
fi
pip_install -v -C build-dir="$1" -C cmake.build-type=Release -e .
# Type checkers look for the stubs beside the Python files.
if [[ -e $1/python/bindings/_lamina.pyi ]]; then cp "$1/python/bindings/_lamina.pyi" python/lamina; fi
pip_install -q -e ./python/compat
