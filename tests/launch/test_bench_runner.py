# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py: what it has started ends with it, however it ends."""

import signal
import sys

import pytest
from launch.launcher_harness import READY, ROOT, command, eventually

RUNNER = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import run
run.OUT, run.LAMINA = pathlib.Path("bench"), {command()!r}
run.BENCHMARKS = [run.Benchmark("sleeps", pathlib.Path("sleeps.py").absolute())]
sys.exit(run.main())
"""
SLEEPS = f"""
import subprocess
subprocess.run(["sh", "-c", {READY + "setsid sleep 100 & exec sleep 100"!r}])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_all_that_a_benchmark_has_started_ends_with_the_runner(launcher, number):
    (launcher.folder / "runner.py").write_text(RUNNER)
    (launcher.folder / "sleeps.py").write_text(SLEEPS)
    job = launcher.start("runner.py", binary=sys.executable)
    eventually(lambda: (launcher.folder / "ready-0").exists())
    job.send_signal(number)
    job.communicate(timeout=30)
    assert job.returncode != 0
    eventually(lambda: not launcher.processes(), within_s=5)
