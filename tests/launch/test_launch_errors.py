# SPDX-License-Identifier: Apache-2.0
"""`lamina run` when one rank raises and the others fail because of it: the error that tells something comes once."""

import os
import sys
import time
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD
from soak import SOAK

PROGRAM = Path(__file__).with_name("raising.py")

# Says that it ends because of another rank, as an uncaught lamina.PeerError does.
FOLLOWS = """
import os, socket, struct, sys
launcher = socket.socket(fileno=int(os.environ["LAMINA_PROGRESS_FD"]))

def end_by_another():
    launcher.send(struct.pack("qii", 0, os.getpid(), 2) + b"what follows\\n")
    sys.exit(1)

rank = int(os.environ["RANK"])
"""


def run(launcher, program, ranks=3):
    (launcher.folder / "follows.py").write_text(FOLLOWS + program)
    return launcher.run("run", "-n", ranks, "-c", sys.executable, "-S", "follows.py")


@pytest.mark.parametrize("repetition", range(100 if SOAK else 3))
def test_a_rank_that_ends_because_of_another_is_not_named_though_it_ends_first(launcher, repetition):
    """Rank 1 sees through a pipe that both others have ended; then it prints its reason, and ends."""
    os.mkfifo(launcher.folder / "pipe")
    program = """
pipe = os.path.join(os.environ["DIR"], "pipe")
if rank != 1:
    held = os.open(pipe, os.O_WRONLY)
    end_by_another()
with open(pipe) as file:
    file.read()
print("the reason", file=sys.stderr)
sys.exit(7)
"""
    result = run(launcher, program)
    assert result.returncode == 7
    assert result.stderr.splitlines()[:2] == [
        "lamina run: rank 1 failed: exit code 7",
        "---- the last lines of rank 1 ----",
    ]
    assert "the reason\n" in result.stderr and "what follows" not in result.stderr
    assert "lamina run: 2 other ranks ended because of this\n" in result.stderr


def test_where_all_blame_another_the_first_is_shown_with_its_words(launcher):
    """As ranks do whose network fails."""
    result = run(launcher, "end_by_another()", ranks=1)
    assert (result.returncode, result.stderr) == (1, "lamina run: rank 0 failed: exit code 1\nwhat follows\n")


LEAVES = """
def report(step, inside):
    launcher.send(struct.pack("qii", step, os.getpid(), inside))

for step in range(4):
    report(step, 1)
    report(step, 0)
pipe = os.path.join(os.environ["DIR"], "pipe")
if rank == 1:
    held = os.open(pipe, os.O_WRONLY)
    LAST_WORDS
    os._exit(0)
with open(pipe) as file:
    file.read()
os.abort()
"""


@pytest.mark.parametrize(
    "last_words, says",
    [("report(4, 1)", "rank 1 failed: exit code 0 in the middle of step 4"),
     ("pass", "rank 0 failed: killed by signal 6 (SIGABRT), after rank 1 had ended with exit code 0"),
     ("report(0, 3)", "rank 0 failed: killed by signal 6 (SIGABRT)")],
    ids=["in a step", "between steps", "after its session"],
)  # fmt: skip
def test_a_rank_that_left_with_exit_code_0_is_named_where_the_others_counted_on_it(launcher, last_words, says):
    """The other one ends as C++ programs do, without a word of why."""
    os.mkfifo(launcher.folder / "pipe")
    result = run(launcher, LEAVES.replace("LAST_WORDS", last_words), ranks=2)
    assert result.stderr.splitlines()[0] == f"lamina run: {says}"
    assert result.returncode == (1 if "rank 1 failed" in says else 128 + 6)


def test_a_module_that_ends_its_process_is_named(launcher):
    result = launcher.run("run", *PRELOAD, "-n", 2, PROGRAM, "exits", 1)
    assert result.returncode == 1
    assert "\nlamina run: rank 1 failed: exit code 0 in the middle of step 2\n" in result.stderr
    assert "1 other rank ended because of this" in result.stderr and "PeerError" not in result.stderr


ALONE = """
import os, lamina, torch
lamina.init(partitions=1, microbatches=2, ddp=True)
model = lamina.distribute(torch.nn.Linear(4, 4))

@lamina.step
def train(x, exits):
    if exits:
        os._exit(0)
    model.backward(model(x).sum())

for step in range(3):
    train(torch.ones(8, 4), step == 2 and lamina.rank() == 1)
"""


def test_so_is_a_body_of_one_partition(launcher):
    """This job's steps are reported too."""
    (launcher.folder / "alone.py").write_text(ALONE)
    result = launcher.run("run", *PRELOAD, "-n", 2, "alone.py")
    assert result.returncode == 1
    assert "lamina run: rank 1 failed: exit code 0 in the middle of step 2\n" in result.stderr


def test_a_rank_whose_error_was_only_its_own_does_not_hide_that_the_others_ended(launcher):
    """Rank 1 raised, caught it, and goes on: the ranks that did not catch it are the failure, within 5 s."""
    begin = time.monotonic()
    result = run(launcher, "import signal\nend_by_another() if rank == 0 else signal.pause()", ranks=2)
    assert time.monotonic() - begin <= 5
    assert result.returncode == 1
    assert result.stderr.splitlines()[:2] == ["lamina run: rank 0 failed: exit code 1", "what follows"]


FEW = [("forward", 0), ("forward", 1), ("loader", 1)]
ALL = [(where, rank) for where in ("forward", "loader", "end", "uneven") for rank in (0, 1)]


@pytest.mark.parametrize("where, rank", ALL if SOAK else FEW)
def test_the_users_own_traceback_comes_once_and_its_rank_is_named(launcher, where, rank):
    result = launcher.run("run", *PRELOAD, "-n", 2, PROGRAM, where, rank)
    assert result.returncode == 1
    said = [line for line in result.stderr.splitlines() if line.startswith("lamina run: ")]
    if where != "uneven":
        assert said[0] == f"lamina run: rank {rank} failed: exit code 1"
        assert result.stderr.count('raise ValueError("the user') == 1
        shown = result.stderr.index("Traceback (most recent call last)")
        first_said = result.stderr.index("lamina run: ")
        assert (shown < first_said) == (rank == 0), "rank 0 writes to us, before it ends"
    assert "is lost" not in result.stderr or where == "uneven"
    assert result.stderr.count("failed: ") == 1
