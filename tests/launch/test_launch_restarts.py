# SPDX-License-Identifier: Apache-2.0
"""`lamina run --restarts N`: a job that fails is started again, whole."""

import signal

import pytest
from launch.launcher_harness import READY, eventually
from soak import SOAK

COUNTS = "$LAMINA_RESTART $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS"


def test_all_ranks_start_again_and_are_told_how_often_they_were_before(launcher):
    """Rank 1 fails twice, differently; what it goes on from is its own affair, as with a checkpoint."""
    program = f'echo "{COUNTS}" >> $DIR/counts-$RANK; test $LAMINA_RESTART = 2 && exit 0; '
    program += "test $RANK = 0 && exec sleep 100; "
    program += "until test -e $DIR/counts-0 && test $(wc -l < $DIR/counts-0) -gt $LAMINA_RESTART; do :; done; "
    program += "exit $((5 + LAMINA_RESTART))"
    result = launcher.shell(2, program, flags=["--restarts", 3])
    assert result.returncode == 0
    for rank in range(2):
        assert (launcher.folder / f"counts-{rank}").read_text() == "0 0 3\n1 1 3\n2 2 3\n"
    said = [line for line in result.stderr.splitlines() if "rank" in line]
    assert said == [
        "lamina run: rank 1 failed: exit code 5",
        "lamina run: rank 1 had written nothing",
        "lamina run: 1 other rank ended because of this",
        "lamina run: starting all ranks again in 0.5 s: restart 1 of 3",
        "lamina run: rank 1 failed: exit code 6",
        "lamina run: rank 1 had written nothing",
        "lamina run: 1 other rank ended because of this",
        "lamina run: starting all ranks again in 1 s: restart 2 of 3",
    ]


def test_the_same_failure_at_once_is_not_tried_for_ever(launcher):
    result = launcher.shell(2, "echo started $LAMINA_RESTART; exit 7", flags=["--restarts", 100])
    assert result.returncode == 7
    assert result.stdout == "started 0\nstarted 1\n"
    assert "lamina run: the same failure as before, within 10 s of the start: not started again\n" in result.stderr
    assert result.stderr.count("all that the other ranks wrote is in") == 1


def test_nothing_of_the_last_start_is_left_at_the_next(launcher):
    program = "test $LAMINA_RESTART = 1 && exec sh -c 'ls $DIR/*.pid | xargs cat | xargs ps -o pid= -p; exit 0'; "
    program += (
        "setsid sleep 100 & echo $! > $DIR/$RANK.pid; until test -e $DIR/0.pid -a -e $DIR/1.pid; do :; done; exit 1"
    )
    result = launcher.shell(2, program, flags=["--restarts", 1])
    assert (result.returncode, result.stdout) == (0, "")


def test_without_it_nothing_is_started_again(launcher):
    result = launcher.shell(1, "echo started; exit 1")
    assert (result.returncode, result.stdout) == (1, "started\n")


def test_a_job_that_was_told_to_end_is_not_started_again(launcher):
    job = launcher.start_shell(1, READY + "exec sleep 100", flags=["--restarts", 5])
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=10)
    assert job.returncode == 143
    assert "again" not in errors


def test_ctrl_c_between_two_starts_ends_the_job(launcher):
    job = launcher.start("run", "--restarts", 5, "-c", "sh", "-c", "exit 1")
    eventually(lambda: "restart 1 of 5" in job.stderr.readline())
    job.send_signal(signal.SIGINT)
    assert job.wait(10) == 130


def test_a_launcher_killed_between_two_starts_leaves_nobody(launcher):
    job = launcher.start("run", "--restarts", 5, "-c", "sh", "-c", "exit 1")
    eventually(lambda: "restart 1 of 5" in job.stderr.readline())
    job.kill()
    job.wait()
    eventually(lambda: not launcher.processes(), within_s=1)


RESUMES = """
import os, pathlib, signal, sys
import lamina, torch
from torch import nn

folder, last = pathlib.Path(os.environ["DIR"]), 8
fatal = int(sys.argv[1]) if os.environ["LAMINA_RESTART"] == "0" else None
torch.manual_seed(0)
lamina.init(partitions=2, microbatches=2)
model = lamina.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
rank = lamina.rank()

@lamina.step
def train(x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

def data(step):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))

first = 0
if (folder / "step").exists():
    first = int((folder / "step").read_text())
    model.load_state_dict(torch.load(folder / f"model-{first}"))
for step in range(first, last):
    if step == fatal and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss = train(data(step)).reduce_mean()
    optimizer.step()
    state = model.state_dict()
    if rank == 0:
        torch.save(state, folder / f"model-{step + 1}")
        (folder / "step").write_text(str(step + 1))
        with open(folder / "losses", "a") as file:
            print(step, float(loss), file=file)
"""


@pytest.mark.skipif(not SOAK, reason="three jobs with torch: in the soak")
def test_a_script_that_goes_on_from_its_checkpoint_gives_what_it_would_have(launcher):
    (launcher.folder / "train.py").write_text(RESUMES)
    losses = []
    for fatal in (-1, 1, 5):
        result = launcher.run("run", "-n", 2, "--restarts", 1, "train.py", fatal)
        assert result.returncode == 0, result.stderr
        lines = (launcher.folder / "losses").read_text().splitlines()
        losses.append(dict(line.split() for line in lines))
        for name in ("losses", "step"):
            (launcher.folder / name).unlink()
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 8
