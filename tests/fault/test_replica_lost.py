# SPDX-License-Identifier: Apache-2.0
"""A replica that never comes to the averaging of gradients: the others leave with an error that says so."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from fault.beside import Beside
from fault.test_rank_killed import BOUND_S, read, survivors
from launch.launcher_harness import PRELOAD, eventually

REPLICA = Path(__file__).with_name("replica.py")


@pytest.mark.parametrize(
    ("size", "partitions", "victim", "device"),
    [(2, 1, 0, "cpu"), (2, 1, 1, "cpu"), (4, 2, 3, "cpu"), (2, 1, 1, "emulated"), (4, 2, 3, "emulated")],
)
def test_when_it_is_killed_every_survivor_ends_within_5_s_and_says_what_it_was_doing(
    size, partitions, victim, device, launcher
):
    ranks = launcher.start_ranks(size, REPLICA, victim, "killed", partitions, 60, env={"LAMINA_DEVICE": device})
    for rank, error, _ in survivors(launcher, ranks, victim):
        assert "is lost" in error
        if rank % partitions == victim % partitions:
            members = ", ".join(str(member) for member in range(size) if member % partitions == rank % partitions)
            assert f"averaging gradients over ranks {members}: rank {victim} is lost" in error


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_when_it_is_silent_the_others_leave_after_timeout_s(device, launcher):
    silent, other = launcher.start_ranks(2, REPLICA, 0, "silent", 1, 4, env={"LAMINA_DEVICE": device})
    with Beside([other]) as beside:
        output = other.communicate(timeout=60)[1]
    late = time.time() - read(launcher, "death.0")["at"] - 4
    assert other.returncode == 1, output
    error = read(launcher, "error.1")["text"]
    said = "TimeoutError: averaging gradients over ranks 0, 1 without rank 0, which has not come: no answer for 4 s"
    assert error.startswith(said), error
    assert late < beside.scaled(BOUND_S)
    with pytest.raises(subprocess.TimeoutExpired):
        silent.wait(0)
    silent.kill()
    silent.communicate()


def test_an_interrupt_ends_the_wait_and_the_process(launcher):
    silent, other = launcher.start_ranks(2, REPLICA, 0, "silent", 1, 60)
    eventually(lambda: (launcher.folder / "waits.1").exists())
    other.send_signal(signal.SIGINT)
    output = other.communicate(timeout=BOUND_S)[1]
    # 130 to a shell in both cases; the second, where the signal came before the wait.
    assert other.returncode in (130, -signal.SIGINT), output
    assert "KeyboardInterrupt" in output
    silent.kill()
    silent.communicate()


def test_the_launcher_blames_the_killed_rank(launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, REPLICA, 1, "killed", 1, 60)
    verdicts = [line for line in run.stderr.splitlines() if line.startswith("lamina run:")]
    assert verdicts[0] == "lamina run: rank 1 failed: killed by signal 9 (SIGKILL)"
