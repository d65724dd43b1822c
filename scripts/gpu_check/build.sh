#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the engine for the torch of $PYTHON in $BUILD. In an environment of `make build` that is all. Elsewhere nothing is
# installed: build/gpu-site then has the package, as links to its Python files and to the engine, and headers that the
# system lacks are those of `make gpu-pack`.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
if [[ $PYTHON == $(realpath -s "$venv")/bin/python ]]; then
  rm -rf build/gpu-site
  scripts/package.sh "$BUILD"
  exit
fi

settings=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$PYTHON")
if [[ ! -e /usr/include/ucp/api/ucp.h ]]; then
  [[ -d $PACK ]] || stop "UCX's headers are not here, and neither is $PACK: run make gpu-pack where they are, and carry it."
  ucx=$PACK/libucx/lib
  settings+=(-DCMAKE_PREFIX_PATH="$PACK" -DUCX_UCP="$ucx/libucp.so.0" -DUCX_UCS="$ucx/libucs.so.0")
fi
cmake -S . -B "$BUILD" "${settings[@]}"
cmake --build "$BUILD" --target lamina _lamina lamina_ucx lamina_command -j "$(scripts/jobs.sh)"

package=build/gpu-site/lamina
rm -rf "$package"
mkdir -p "$package"
ln -s "$PWD"/python/lamina/* "$package"
ln -s "$BUILD/lib" "$package/torch$("$PYTHON" -c 'import torch; print(".".join(torch.__version__.split(".")[:2]))')"
"$PYTHON" -c 'import lamina, torch; print(f"{lamina.__file__} for torch {torch.__version__}")'
