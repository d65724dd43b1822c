# SPDX-License-Identifier: Apache-2.0
"""How much slower a job is for what else the machine does, measured beside it. A bound that is promised for a machine
of one's own is multiplied by that; on such a machine it is 1."""

import os
import threading
from pathlib import Path

_LOOK_AGAIN_S = 0.1


class Beside:
    """Counts, while it is open, the threads of others that want a processor."""

    def __init__(self, ranks):
        self._pids = [rank.pid for rank in ranks]
        self._looks, self._others = 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def scaled(self, bound_s):
        """A bound of a machine that does nothing else."""
        at_once = max(len(self._pids), len(os.sched_getaffinity(0)))
        return bound_s * (1 + self._others / max(self._looks, 1) / at_once)

    def _look(self):
        while not self._over.wait(_LOOK_AGAIN_S):
            running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
            self._looks += 1
            self._others += max(0, running - 1 - sum(map(_running_threads, self._pids)))  # but for this thread


def _running_threads(pid):
    try:
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # it has ended
        return 0
    return states.count("R")
