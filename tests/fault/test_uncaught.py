# SPDX-License-Identifier: Apache-2.0
"""An exception that nobody catches: the user reads its own traceback first, and once, and the job's exit code is the
one that Python gives."""

import random
import re
from pathlib import Path

import pytest
from launch.launcher_harness import PRELOAD
from soak import SOAK, some

RAISES = Path(__file__).with_name("raises.py")
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
    assert read[0] == "Traceback (most recent call last):"
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    assert run.stderr.count(f'reaches("{place}")') == 1, run.stderr
    verdicts = [line for line in run.stderr.splitlines() if line.startswith("lamina run:")]
    assert verdicts[0].startswith(f"lamina run: rank {rank} failed: ")


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
    assert outputs[1].startswith("Traceback (most recent call last):\n")
    assert outputs[1].rstrip().endswith("MyError: mine")
    for other in (0, 2):
        line = "lamina: rank 1 raised __main__.MyError: mine; its traceback is in what that rank wrote"
        assert read_by_user(outputs[other]) == [line]
