# SPDX-License-Identifier: Apache-2.0
"""Jobs that run many cases in one launch, each rank with a Report of them."""

import contextlib
import functools
import json
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterable

import pytest
from launch.case_report import CHOSEN, read
from launch.forked_ranks import stacks
from launch.launcher_harness import PRELOAD_COMPILER, Launcher
from soak import SOAK

TESTS = pathlib.Path(__file__).resolve().parents[1]
STALL_S = 400.0  # without a case that ends; longer than a case may hang
GRACE_S = 10.0  # for the other ranks to end, when one has failed
LOOK_S = 1.0  # between two looks at how far the cases are


_chosen: dict[str, set[str]] = {}  # of each job


def of_job(job: str, name: str, *values):
    """The parameters of a test of that job: see pytest_xdist_make_scheduler. The first one waits for the whole job,
    whose deadline follows its cases."""
    return pytest.param(*values, id=f"{name}@{job}", marks=pytest.mark.timeout(0))


def choose(tests: Iterable[str]) -> None:
    """Has each job run only the cases of these tests. A test without a case asks about all that run; alone, about the
    job with all cases."""
    _chosen.clear()
    for test in tests:
        case, at, job = test.partition("[")[2].removesuffix("]").rpartition("@")
        if at and case:
            _chosen.setdefault(job, set()).add(case)


@functools.cache
def results(job: str, ranks: int, program: str, *arguments: str) -> dict[str, list[str]]:
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
            wrong = run(launcher, ranks, TESTS / program, *arguments)
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


class _Progress:
    """A deadline that each case that ends on a rank puts off: slow machines pass, a job that hangs does not."""

    def __init__(self, launcher: Launcher, ranks: int):
        self._launcher, self._ranks, self._ended, self.by = launcher, ranks, 0, time.monotonic() + STALL_S

    def wait(self, process) -> bool:
        """False where the process has not ended by then."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, min(LOOK_S, self.by - time.monotonic())))
                return True
            ended = sum(len(read(self._launcher.folder, rank)) for rank in range(self._ranks))
            if ended > self._ended:
                self._ended, self.by = ended, time.monotonic() + STALL_S
            if time.monotonic() > self.by:
                return False


def _launch(launcher: Launcher, ranks: int, *words) -> list[str]:
    with (launcher.folder / "errors").open("w+") as errors:
        job = launcher.start("run", *PRELOAD_COMPILER, "-n", ranks, *words, stdout=subprocess.DEVNULL, stderr=errors)
        if not _Progress(launcher, ranks).wait(job):
            return [f"no case ended for {STALL_S} s"]
        errors.seek(0)
        return [f"exit code {job.returncode}\n{errors.read()[-4000:]}"] if job.returncode else []


def _fork(launcher: Launcher, ranks: int, *words) -> list[str]:
    progress = _Progress(launcher, ranks)
    wrong = []
    for rank, process in enumerate(launcher.start_ranks(ranks, *words)):
        if progress.wait(process):
            if process.returncode:
                wrong.append(f"rank {rank}: exit code {process.returncode}\n{process.communicate()[1][-4000:]}")
        else:
            wrong.append(f"rank {rank} did not end, and no case for {STALL_S} s\n{stacks(process.pid)}")
        if wrong:
            progress.by = min(progress.by, time.monotonic() + GRACE_S)
    return wrong
