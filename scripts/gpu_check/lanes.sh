#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lanes.sh COMMAND...: the command with LAMINA_LANES=1, whose ranks have to say that large tensors go from device to
# device. It ends as not here where UCX knows no memory of the device. Emulated devices lend none: there ranks have to
# say that tensors go through the host.
set -euo pipefail
said=$(mktemp)
trap 'rm -f "$said"' EXIT
LAMINA_LANES=1 "$@" 2>&1 | tee "$said"
if grep -q "this UCX knows no memory of kind" "$said"; then
  echo "not here: a UCX that knows the device's memory, as the one of make gpu-pack does"
  exit 77
fi
expected="go from device to device, as memory of kind .*, from rank 0 to rank"
if [[ ${LAMINA_DEVICE:-} == emulated* ]]; then expected="lend no memory, so their tensors go through the host"; fi
if ! grep -q "$expected" "$said"; then
  echo "WRONG: no rank said \"$expected\""
  exit 1
fi
