# SPDX-License-Identifier: Apache-2.0
"""A rank of four is killed amid a training (elastic_ranks.py): the time until all that are left have ended that step.
Copies go on from memory. Beside them the job is started again from checkpoints that lie in memory, by lamina and by
torchrun with those of torch.

    python benchmarks/elastic.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import LAMINA, Report, arguments

RANKS, LIMIT_S = 4, 300
PROGRAM = Path(__file__).with_name("elastic_ranks.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
WAYS = {
    "copies": ("lamina, from memory", [LAMINA, "run", "-n", RANKS, "--elastic", 2]),
    "restarts": ("lamina, started again", [LAMINA, "run", "-n", RANKS, "--restarts", 1, "--preload", "torch,lamina"]),
    "torch": ("torchrun, started again", [*TORCHRUN, "--max-restarts=1"]),
}


def told(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and times of each rank that has told of some."""
    found: dict[str, list[tuple[int, float]]] = {"dies": [], "ended": []}
    for file in folder.glob("told.*"):
        for line in file.read_text().splitlines():
            word, step, time = line.split()
            found[word].append((int(step), float(time)))
    return found


def seconds(way: str, steps: int, fatal: int) -> float:
    """Runs a job. Returns the time from the death to the end of that step on all ranks that end it."""
    _, start = WAYS[way]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        words = [*start, PROGRAM, way, folder, steps, fatal]
        subprocess.run(list(map(str, words)), check=True, timeout=LIMIT_S, stdout=sys.stderr)
        found = told(Path(folder))
        ((_, death),) = found["dies"]
        ends = [time for step, time in found["ended"] if step == fatal]
        shutil.rmtree(Path(folder) / "saved", ignore_errors=True)
    return max(ends) - death


def main() -> None:
    options = arguments(__doc__)
    report = Report(options.name or "elastic", f"A rank of {RANKS} is killed: a GPT of 8 million parameters, AdamW")
    turns, steps, fatal = options.pick(1, 3, 7), 16, 13
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way, values in found.items():
            values.append(seconds(way, steps, fatal))
    for way, values in found.items():
        report.add(WAYS[way][0], "death to the end of the step", "s", values)
    report.finish()


if __name__ == "__main__":
    main()
