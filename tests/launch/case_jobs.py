# SPDX-License-Identifier: Apache-2.0
"""Jobs that run many cases in one launch, each rank with a Report of them."""

import functools
import json
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterable

import pytest
from launch.case_report import CHOSEN, read
from launch.launcher_harness import PRELOAD_COMPILER, Launcher
from soak import SOAK

TESTS = pathlib.Path(__file__).resolve().parents[1]
GRACE_S = 10.0  # for the other ranks to end, when one has failed


_chosen: dict[str, set[str]] = {}  # of each job


def of_job(job: str, name: str, *values):
    """The parameters of a test of that job: see pytest_xdist_make_scheduler."""
    return pytest.param(*values, id=f"{name}@{job}")


def choose(tests: Iterable[str]) -> None:
    """Has each job run only the cases of these tests. A test without a case asks about all that run; alone, about the
    job with all cases."""
    _chosen.clear()
    for test in tests:
        case, at, job = test.partition("[")[2].removesuffix("]").rpartition("@")
        if at and case:
            _chosen.setdefault(job, set()).add(case)


@functools.cache
def results(job: str, ranks: int, deadline_s: float, program: str, *arguments: str) -> dict[str, list[str]]:
    """Lists what was wrong with each chosen case that ended on every rank; under "launch", with the job as a whole: how
    it ended, and what it left behind. (A port is held by a process, so no process is no port.)

    A soak starts the job by `lamina run`.
    """
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(pathlib.Path(folder))
        if job in _chosen:
            (launcher.folder / CHOSEN).write_text(json.dumps(sorted(_chosen[job])))
        try:
            run = _launch if SOAK else _fork
            wrong = run(launcher, ranks, deadline_s, TESTS / program, *arguments)
            wrong += launcher.left_behind()
        finally:
            launcher.clean_up()
        said = [read(launcher.folder, rank) for rank in range(ranks)]
    names = [name for name in said[0] if all(name in one for one in said)]
    found = {name: [f"rank {r}: {line}" for r, one in enumerate(said) for line in one[name]] for name in names}
    if wrong:
        wrong += [
            f"rank {r} ended {len(one)} cases, the last: {next(reversed(one), None)}" for r, one in enumerate(said)
        ]
    return found | {"launch": wrong}


def _launch(launcher: Launcher, ranks: int, deadline_s: float, *words) -> list[str]:
    job = launcher.start("run", *PRELOAD_COMPILER, "-n", ranks, *words)
    try:
        _, errors = job.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return [f"it did not end within {deadline_s} s"]
    return [f"exit code {job.returncode}\n{errors[-4000:]}"] if job.returncode else []


def _fork(launcher: Launcher, ranks: int, deadline_s: float, *words) -> list[str]:
    deadline = time.monotonic() + deadline_s
    wrong = []
    for rank, process in enumerate(launcher.start_ranks(ranks, *words)):
        try:
            _, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode:
                wrong.append(f"rank {rank}: exit code {process.returncode}\n{errors[-4000:]}")
        except subprocess.TimeoutExpired:
            wrong.append(f"rank {rank} did not end in time")
        if wrong:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    return wrong
