# SPDX-License-Identifier: Apache-2.0
"""dist_start.py TIMEOUT_S: a rank of a job that starts badly; says what initialize_dist raised, and after how long."""

import sys
import time

from lamina import dist

begin = time.monotonic()
try:
    dist.initialize_dist("cpu", timeout=float(sys.argv[1]))
    said = "nothing"
except Exception as error:
    said = f"{type(error).__module__}.{type(error).__name__}: {error}"
print(time.monotonic() - begin, said.splitlines()[0])
