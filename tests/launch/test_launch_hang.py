# SPDX-License-Identifier: Apache-2.0
"""`lamina run --hang-timeout S`: a job that makes no step is ended, and the place of each rank is said."""

import os
import re
import signal
import sys
import time

from launch.launcher_harness import PRELOAD, READY, eventually

# Reports steps as the engine does, and is stuck where the test says.
STEPS = """
import os, pathlib, signal, socket, struct, sys, time
rank = int(os.environ["RANK"])
launcher = socket.socket(fileno=int(os.environ["LAMINA_PROGRESS_FD"]))

def report(step, inside):
    launcher.send(struct.pack("qii", step, os.getpid(), inside))

def steps(count, takes_s=0.0):
    for step in range(count):
        report(step, 1)
        time.sleep(takes_s)
        report(step, 0)

def stuck_in_its_loader():
    pathlib.Path(os.environ["DIR"], f"ready-{rank}").touch()
    while True:
        signal.pause()

def waiting_for_peers(step):
    report(step, 1)
    stuck_in_its_loader()

folder = pathlib.Path(os.environ["DIR"])
(folder / f"here-{rank}").touch()
while len(list(folder.glob("here-*"))) < int(os.environ["WORLD_SIZE"]):
    pass

"""


def start(launcher, ranks, timeout_s, program, *flags):
    (launcher.folder / "steps.py").write_text(STEPS + program)
    return launcher.start("run", "-n", ranks, "--hang-timeout", timeout_s, *flags,
                          "-c", sys.executable, "-S", "steps.py")  # fmt: skip


def test_who_was_where_and_the_stacks_are_shown(launcher):
    job = start(launcher, 4, 2, "steps(12)\nstuck_in_its_loader() if rank == 2 else waiting_for_peers(12)")
    eventually(lambda: len(list(launcher.folder.glob("ready-*"))) == 4)
    begin = time.monotonic()
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 124
    assert time.monotonic() - begin <= 2 + 2
    lines = errors.splitlines()
    assert lines[0] == "lamina run: the job hangs: no rank has begun or ended a step for 2 s (--hang-timeout)"
    assert lines[1:3] == ["lamina run: ranks 0, 1, 3: in step 12 for 2 s", "lamina run: rank 2: after step 11 for 2 s"]
    stacks = dict(re.findall(r"---- the stacks of rank (\d) ----\n(.*?)---- end of rank \1 ----\n", errors, re.DOTALL))
    assert set(stacks) == {"1", "2", "3"}
    for rank, stack in stacks.items():
        assert "in stuck_in_its_loader" in stack
        assert ("in waiting_for_peers" in stack) == (rank != "2")
    assert "in waiting_for_peers" in errors[: errors.index("---- the stacks")], "rank 0 writes to us"


def test_a_rank_that_waits_before_its_first_step_is_shown_too(launcher):
    job = start(launcher, 2, 2, "stuck_in_its_loader() if rank == 1 else waiting_for_peers(0)")
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 124
    assert "lamina run: rank 1: never reported a step\n" in errors
    assert "in stuck_in_its_loader" in errors[errors.index("---- the stacks of rank 1") :]


def test_slow_is_not_hung(launcher):
    """Steps of half the timeout, for longer than it."""
    job = start(launcher, 2, 3, "steps(3, takes_s=1.5)")
    assert job.communicate(timeout=30) == ("", "")
    assert job.returncode == 0


def test_a_job_that_never_begins_a_step_hangs_too(launcher):
    """The time counts from the start of the ranks."""
    begin = time.monotonic()
    result = launcher.shell(2, "exec sleep 100", flags=["--hang-timeout", 1])
    assert result.returncode == 124
    assert 1 <= time.monotonic() - begin <= 1 + 2
    assert result.stderr.splitlines() == [
        "lamina run: the job hangs: no rank has begun or ended a step for 1 s (--hang-timeout)",
        "lamina run: ranks 0, 1: never reported a step",
    ]


def test_a_rank_that_has_ended_is_not_waited_for(launcher):
    """Nor does it stand for progress: the other one hangs."""
    job = start(launcher, 2, 2, "steps(3)\nrank == 0 and sys.exit()\nstuck_in_its_loader()")
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 124
    assert "lamina run: rank 1: after step 2 for 2 s" in errors and "rank 0:" not in errors


def test_a_job_that_hung_may_be_started_again(launcher):
    program = "steps(3)\nos.environ['LAMINA_RESTART'] == '0' and stuck_in_its_loader()"
    job = start(launcher, 2, 2, program, "--restarts", 1)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 0
    assert "the job hangs" in errors and "restart 1 of 1" in errors


def rank_process(launcher, rank):
    for pid in launcher.processes():
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"RANK={rank}".encode() in file.read().split(b"\0"):
                return pid
    raise LookupError(f"no rank {rank}")


def test_a_stopped_rank_is_named_within_4_s_and_how_it_goes_on(launcher):
    """Also without a time limit."""
    job = launcher.start_shell(3, READY + "exec sleep 100")
    process = rank_process(launcher, 1)
    begin = time.monotonic()
    os.kill(process, signal.SIGSTOP)
    line = job.stderr.readline()
    assert time.monotonic() - begin <= 4
    assert line == (
        f"lamina run: warning: rank 1 is stopped (SIGSTOP or the like); `kill -CONT {process}` lets it go on\n"
    )
    job.terminate()
    assert job.wait(10) == 143


def test_a_rank_that_is_stopped_while_other_machines_wait_for_it_is_ended_after_their_timeout(launcher):
    """It is alone on its machine, whose launcher learns of no other rank's end."""
    program = "launcher.send(struct.pack('qii', 1000, os.getpid(), 4))\nstuck_in_its_loader()"
    (launcher.folder / "here-0").touch()
    job = start(launcher, 1, 600, program, "--nnodes", 2, "--node-rank", 1, "--master-addr", "127.0.0.1",
                "--master-port", 4711)  # fmt: skip
    eventually(lambda: (launcher.folder / "ready-1").exists())
    os.kill(rank_process(launcher, 1), signal.SIGSTOP)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 124
    said = "rank 1 has been stopped for longer than timeout_s: ranks on other machines have ended without it"
    assert f"lamina run: {said}\n" in errors
    assert "in stuck_in_its_loader" in errors


def test_so_is_one_that_a_shell_has_started(launcher):
    """The kernel tells the launcher of the shell only."""
    program = "launcher.send(struct.pack('qii', 1000, os.getpid(), 4))\nos.kill(os.getpid(), signal.SIGSTOP)"
    (launcher.folder / "here-0").touch()
    (launcher.folder / "steps.py").write_text(STEPS + program)
    command = ["-c", "bash", "-c", f"{sys.executable} -S steps.py; exit $?"]
    job = launcher.start("run", "-n", 1, "--nnodes", 2, "--node-rank", 1, "--master-addr", "127.0.0.1",
                         "--master-port", 4711, *command)  # fmt: skip
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 124
    assert "lamina run: rank 1 has been stopped for longer than timeout_s" in errors


def test_a_stopped_rank_that_hangs_the_job_is_named_and_shows_its_stack(launcher):
    job = start(launcher, 2, 2, "steps(5)\nstuck_in_its_loader()")
    eventually(lambda: len(list(launcher.folder.glob("ready-*"))) == 2)
    os.kill(rank_process(launcher, 1), signal.SIGSTOP)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 124
    assert re.search(r"rank 1: stopped by SIGSTOP \d s ago, after step 4 for 2 s\n", errors)
    assert "in stuck_in_its_loader" in errors[errors.index("---- the stacks of rank 1") :]


TRAINS = """
import os, socket, struct, threading

started = threading.Event()

def report_until_started():
    # The start takes longer than the limit where many tests run.
    launcher = socket.socket(fileno=os.dup(int(os.environ["LAMINA_PROGRESS_FD"])))
    while not started.wait(0.5):
        launcher.send(struct.pack("qii", -1, os.getpid(), 0))

threading.Thread(target=report_until_started, daemon=True).start()
import lamina, torch
from torch import nn

class Stops(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 12 and lamina.rank() == 1:
            self.wait_for_a_lock_that_nobody_opens()
        return super().forward(x)
    def wait_for_a_lock_that_nobody_opens(self):
        threading.Event().wait()

lamina.init(partitions=2, microbatches=4)
model = lamina.distribute(nn.Sequential(Stops(4, 4), Stops(4, 4)))

@lamina.step
def train(x):
    model.backward(model(x).sum())

for _ in range(10):
    train(torch.randn(8, 4))
    started.set()
"""


def test_a_model_that_hangs_shows_the_module_it_hangs_in(launcher):
    (launcher.folder / "train.py").write_text(TRAINS)
    job = launcher.start("run", *PRELOAD, "-n", 2, "--hang-timeout", 10, "train.py")
    _, errors = job.communicate(timeout=100)
    assert job.returncode == 124
    assert re.search(r"lamina run: ranks? (0, )?1: in step [1-9] for \d+ s\n", errors)
    assert "wait_for_a_lock_that_nobody_opens" in errors[errors.index("---- the stacks of rank 1") :]
