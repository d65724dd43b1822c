# SPDX-License-Identifier: Apache-2.0
"""One launch of a script for all cases of a world size. Each rank of it writes a JSON line per case into the file
wrong-RANK of the folder $DIR: the case's name, and what is wrong with it on that rank.
"""

import functools
import json
import pathlib
import subprocess
import tempfile

from launch.launcher_harness import Launcher

HERE = pathlib.Path(__file__).parent


def wrong_on(folder: pathlib.Path, rank: int) -> dict[str, list[str]]:
    file = folder / f"wrong-{rank}"
    return dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}


@functools.cache
def results(script: str, world: int, deadline_s: float) -> dict[str, list[str]]:
    """What was wrong with each case; under "launch", with the launch itself."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(pathlib.Path(folder))
        try:
            job = launcher.start("run", "-n", world, HERE / script)
            _, errors = job.communicate(timeout=deadline_s)
            left = launcher.left_behind()
        except subprocess.TimeoutExpired:
            left, errors = [], f"it did not end within {deadline_s} s"
        finally:
            launcher.clean_up()
        per_rank = [wrong_on(pathlib.Path(folder), rank) for rank in range(world)]
    # A case counts when it ended on every rank.
    names = set.intersection(*map(set, per_rank))
    found = {n: [f"rank {r}: {line}" for r, wrong in enumerate(per_rank) for line in wrong[n]] for n in names}
    found["launch"] = left
    if job.returncode:
        ended = [f"rank {r} ended {len(w)} cases, the last: {next(reversed(w), None)}" for r, w in enumerate(per_rank)]
        found["launch"] += [f"exit code {job.returncode}", *ended, errors[-4000:]]
    return found
