# SPDX-License-Identifier: Apache-2.0
"""Runs all cases of a file in one launch, and looks for what it leaves behind."""

import functools
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

from launch.launcher_harness import Launcher

TESTS = pathlib.Path(__file__).resolve().parents[1]
DEADLINE_S = 280.0  # only a hang reaches it


def cases(module_name: str) -> dict[str, Callable[[], None]]:
    """The functions `case_...` of a module, in their order."""
    members = vars(importlib.import_module(module_name))
    return {name.removeprefix("case_"): case for name, case in members.items() if name.startswith("case_")}


@functools.cache
def verdicts(module_name: str, ranks: int) -> dict[str, list[str]]:
    """What each case of the module said on each rank: "" where it held, else a traceback.

    Under "launch" stands what was wrong with the job as a whole: how it ended, and what it left behind. A port is held
    by a process, so no process is no port.
    """
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(pathlib.Path(folder))
        try:
            job = launcher.start("run", "-n", ranks, TESTS / "multiprocess/run_cases.py", module_name)
            try:
                _, errors = job.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                errors = "it did not end"
            left = launcher.left_behind()
        finally:
            launcher.clean_up()
        found = {}
        for rank in range(ranks):
            file = launcher.folder / f"verdicts-{rank}"
            for line in file.read_text().splitlines() if file.exists() else ():
                case, verdict = json.loads(line)
                found.setdefault(case, []).append(f"rank {rank}: {verdict}" if verdict else "")
        found["launch"] = [f"exit code {job.returncode}\n{errors}" if job.returncode else "", *left]
        return found


if __name__ == "__main__":
    print(json.dumps(verdicts(sys.argv[1], int(sys.argv[2])), indent=1).replace("\\n", "\n"))
