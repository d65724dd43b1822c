# SPDX-License-Identifier: Apache-2.0
"""A rank of four, drawn at random, is killed each 20 s of a training (elastic_ranks.py): the steps that count, of
those of a training that nobody disturbs. Copies go on from memory, and killed ones come back. Beside them the job is
started again from checkpoints that lie in memory, by lamina and by torchrun with those of torch.

    python benchmarks/elastic_kills.py
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elastic import LIMIT_S, PROGRAM, RANKS, TORCHRUN, WAYS, told
from measure import LAMINA, Report, arguments

EACH_S, WARM, ALL = 20, 20, 10**9
PRELOAD = ["--preload", "torch,lamina"]
STARTS = {
    "copies": [LAMINA, "run", "-n", RANKS, "--elastic", f"2:{RANKS}", *PRELOAD],
    "restarts": [LAMINA, "run", "-n", RANKS, "--restarts", 1000, *PRELOAD],
    "torch": [*TORCHRUN, "--max-restarts=1000"],
}


def steps_in(way: str, window_s: int, draw: random.Random | None) -> float:
    """Steps that a job makes in that time, after its first ones. `draw` says which ranks are killed; None: nobody."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        words = list(map(str, [*STARTS[way], PROGRAM, way, folder, ALL]))
        job = subprocess.Popen(words, stdout=sys.stderr, start_new_session=True)
        try:
            by = time.monotonic() + LIMIT_S
            while last_of(folder) < WARM:
                if job.poll() is not None or time.monotonic() > by:
                    raise RuntimeError(f"{way}: the job has not begun")
                time.sleep(0.1)
            first, began = last_of(folder), time.monotonic()
            kill_at = began + EACH_S / 2
            while (now := time.monotonic()) < began + window_s:
                if job.poll() is not None:
                    raise RuntimeError(f"{way}: the job has ended")
                if draw is not None and now >= kill_at:
                    kill_at += EACH_S
                    os.kill(draw.choice(ranks_of(folder)), signal.SIGKILL)
                time.sleep(0.05)
            return last_of(folder) - first
        finally:
            with contextlib.suppress(ProcessLookupError):
                job.send_signal(signal.SIGINT)
            job.wait(60)


def last_of(folder: Path) -> int:
    """The last step that a rank has ended; -1 before the first one."""
    return max((step for step, _ in told(folder)["ended"]), default=-1)


def ranks_of(folder: Path) -> list[int]:
    """The processes that have told of steps, and live."""
    found = (int(file.suffix[1:]) for file in folder.glob("told.*"))
    return sorted(process for process in found if Path(f"/proc/{process}").exists())


def main() -> None:
    options = arguments(__doc__)
    title = f"A rank of {RANKS} is killed each {EACH_S} s: a GPT of 8 million parameters, AdamW"
    report = Report(options.name or "elastic_kills", title)
    longest = options.pick(40, 120, 600)
    undisturbed = {}
    for way, (case, _) in WAYS.items():
        window = longest if way == "copies" else min(longest, 120)
        kind = "torch" if way == "torch" else "copies"
        if kind not in undisturbed:
            quiet = min(longest, 120)
            undisturbed[kind] = steps_in(kind, quiet, None) / quiet
            name = case.partition(",")[0]
            report.add(f"{name}, undisturbed", "steps a second", "1/s", [undisturbed[kind]])
        rate = steps_in(way, window, random.Random(0)) / window
        report.add(f"{case}, {window} s", "steps a second", "1/s", [rate], of_undisturbed=rate / undisturbed[kind])
    report.finish()


if __name__ == "__main__":
    main()
