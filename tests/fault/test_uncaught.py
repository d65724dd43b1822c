# SPDX-License-Identifier: Apache-2.0
"""An exception that nobody catches: the user reads its own traceback first, and once, and the job's exit code is the
one that Python gives."""

import random
import re
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD
from soak import SOAK, some

import lamina

RAISES = Path(__file__).with_name("raises.py")
OWN_ERROR = RAISES.with_name("own_error.py")
TRACEBACK = "Traceback (most recent call last):"
WHATS = {
    "MyError('mine')": 1,
    "SystemExit(7)": 7,
    "SystemExit()": 0,
    "SystemExit('some words')": 1,
    "KeyboardInterrupt": 130,
}
PLACES = [("body", 0), ("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
EVERY = [(what, *place) for what in WHATS for place in PLACES]
# One of each, in a place that the seed draws; all of them in a soak.
FEW = [(what, *random.Random(what).choice(PLACES)) for what in WHATS] + [("MyError('mine')", "forward", 1)]
CHOSEN = EVERY if SOAK else sorted(set(FEW))
ONE_PLACE = some(PLACES, 1, seed=3)


def read_by_user(errors):
    """Without what lamina tells of the model, of the batch, and of ranks."""
    lines = re.sub(r"Partition assignments:(.*\n)*?(bubble|predicted step).*\n", "", errors).splitlines()
    of_lamina = re.compile(r"lamina run:|----|\[lamina rank|lamina: \S+: split into ")
    return [line for line in lines if not of_lamina.match(line)]


@pytest.mark.parametrize(("what", "place", "rank"), CHOSEN)
def test_its_own_traceback_is_read_first_and_once_and_it_decides_the_exit_code(what, place, rank, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, RAISES, what, place, rank)
    assert run.returncode == WHATS[what], run.stderr
    read = read_by_user(run.stderr)
    if what.startswith("SystemExit"):
        assert "Traceback" not in run.stderr
        assert read == (["some words"] if "words" in what else [])
        return
    called = rank == 1  # by the rank that leads, whose lines come before
    assert read[0] == f"{'On rank 0' if called else 'Traceback'} (most recent call last):"
    if called:
        body = "model(x)" if place == "forward" else "model.backward(loss)"
        assert body in read[2] and read.index("which met this of rank 1:") == read.index(TRACEBACK) - 1
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    assert run.stderr.count(f'reaches("{place}")') == 1, run.stderr
    verdicts = [line for line in run.stderr.splitlines() if line.startswith("lamina run:")]
    assert verdicts[0].startswith(f"lamina run: rank {rank} failed: ")


@pytest.mark.parametrize("when", ["first", "later"])
def test_the_lines_of_the_body_and_of_each_forward_are_read_and_none_of_ours(when, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, OWN_ERROR, when)
    assert run.returncode == 1
    lines = ["y = model(x)  # the body's line", "return self.parts[-1](x, is_good)", "return super().forward("]
    places = [run.stderr.index(line) for line in lines]
    assert places == sorted(places) and all(run.stderr.count(line) == 1 for line in lines), run.stderr
    assert "mat1 and mat2 shapes cannot be multiplied (3x4 and 8x8)" in run.stderr
    assert str(Path(lamina.__file__).parent) not in run.stderr
    assert ("Partition assignments" in run.stderr) == (when == "later")


@pytest.mark.parametrize("place", ONE_PLACE)
def test_the_same_beside_a_process_group_of_the_program(place, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, RAISES, "MyError('mine')", *place, "group")
    assert run.returncode == 1
    read = read_by_user(run.stderr)
    assert read[0].endswith("Traceback (most recent call last):")
    assert read[-1].endswith("MyError: mine")
    assert run.stderr.count(f'reaches("{place[0]}")') == 1, run.stderr


@pytest.mark.parametrize("place", ONE_PLACE)
def test_threads_of_the_program_keep_no_rank_and_no_traceback(place, launcher):
    run = launcher.run("run", *PRELOAD, "-n", 2, RAISES, "MyError('mine')", *place, "thread")
    assert run.returncode == 1
    assert run.stderr.count(f'reaches("{place[0]}")') == 1, run.stderr
    assert "in which threads still ran: endless" in run.stderr


def test_without_a_launcher_only_the_rank_that_raised_shows_it(launcher):
    ranks = launcher.start_ranks(3, RAISES, "MyError('mine')", "forward", 1)
    outputs = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1, 1]
    assert outputs[1].startswith("On rank 0 (most recent call last):\n")
    assert outputs[1].rstrip().endswith("MyError: mine")
    for other in (0, 2):
        line = "lamina: rank 1 raised __main__.MyError: mine; its traceback is in what that rank wrote"
        assert read_by_user(outputs[other]) == [line]
