#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints how many compilers to run at once: one a core, each with 3 GiB, as torch's headers need.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
fitting=$(awk '/^MemAvailable:/ {print int($2 / (3 * 1024 * 1024))}' /proc/meminfo)
jobs=$((cores < fitting ? cores : fitting))
echo $((jobs > 0 ? jobs : 1))
