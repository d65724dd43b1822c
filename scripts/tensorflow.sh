#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tensorflow.sh BUILD: makes build/tensorflow/venv, which has TensorFlow and all that the environment of the build has,
# and puts the library of operators into it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build=$1
version=2.21
made=build/tensorflow/venv

pip() { "$made/bin/python" -m pip --disable-pip-version-check "$@" </dev/null; }

if [[ ! -x $made/bin/python ]]; then
  say "making $made"
  "$venv/bin/python" -m venv "$made"
fi
site=$("$made/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
theirs=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
ln -sf "$PWD/$venv/bin/lamina" "$made/bin/lamina"
echo "import site; site.addsitedir('$theirs')" >"$site/of_the_build.pth"
found=$("$made/bin/python" -c 'from importlib.metadata import version; print(version("tensorflow-cpu"))' 2>/dev/null || true)
if [[ $found != $version.* ]]; then
  say "installing TensorFlow $version: 0.3 GB to fetch, 1.5 GB on disk"
  pip install -q "tensorflow-cpu==$version.*"
  pip install -q --no-deps "tf_keras==$version.*"
fi
cmake -S . -B "$build" -DLAMINA_TENSORFLOW="$PWD/$made/bin/python" >/dev/null
cmake --build "$build" --target lamina_tensorflow -j "$(scripts/jobs.sh)"
mkdir -p "$site/lamina_operators"
cp "$(find "$build" -name liblamina_tensorflow.so)" "$site/lamina_operators/"
"$made/bin/python" -c 'from importlib.metadata import version; print(version("tensorflow-cpu"))' \
  >"$site/lamina_operators/built_with"
