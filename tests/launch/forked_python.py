# SPDX-License-Identifier: Apache-2.0
"""forked_python.py PROGRAM ARGUMENTS: what `python PROGRAM ARGUMENTS` does, in a process that is copied: see
forked_ranks.py."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.forked_ranks import ForkedRank

process = ForkedRank(sys.argv[1:], dict(os.environ), Path.cwd(), 0)
out, errors = process.communicate()
print(errors, out, sep="", end="")
for name in ("stdout-0", "stderr-0"):
    Path(name).unlink()
sys.exit(process.returncode)
