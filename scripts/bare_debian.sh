#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the targets that it is given, on a Debian that has nothing yet: `make` installs the rest. For the Dockerfile and
# scripts/debian13.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export DEBIAN_FRONTEND=noninteractive
if ! command -v make >/dev/null; then
  apt-get -q update
  apt-get -q -y install --no-install-recommends make ca-certificates
fi
make "$@"
