# SPDX-License-Identifier: Apache-2.0
"""Copies of a model of which one stands still: the others go on without it after silent_s, and it ends. One that is
busy is left alone."""

import json
import signal
import time

import pytest
import torch
from fault.beside import Beside
from fault.test_joining import require_undisturbed as require_joined
from fault.test_outliving import BOUND_S, PROGRAM, require_undisturbed
from launch.launcher_harness import PRELOAD, eventually
from soak import some

SILENT_S = 2.0
WAKES_S = 1.0  # from SIGCONT to its end


def found(launcher, ranks):
    return {rank: torch.load(launcher.folder / f"end.{rank}") for rank in ranks}


def began(launcher):
    """When it stopped, or became busy."""
    (note,) = eventually(lambda: list(launcher.folder.glob("death-*")))
    return eventually(lambda: note.read_text() and json.loads(note.read_text()))["at"]


EVERY = [(place, victim) for place in ("forward", "before", "after") for victim in range(3)]


@pytest.mark.parametrize(("place", "victim"), some(EVERY, 2, seed=6))
def test_the_others_go_on_and_it_ends_itself_when_it_wakes(place, victim, launcher):
    started = launcher.start_ranks(3, PROGRAM, place, str(victim), env={"STOPS": "1", "SILENT": str(SILENT_S)})
    others = [rank for number, rank in enumerate(started) if number != victim]
    with Beside(started) as beside:
        outputs = [rank.communicate(timeout=90) for rank in others]
        assert [rank.returncode for rank in others] == [0, 0], outputs
    ends = found(launcher, set(range(3)) - {victim})
    require_undisturbed(ends, 2)
    stopped = began(launcher)
    for end in ends.values():
        assert SILENT_S - 1 < end["went_on"][0] - stopped < SILENT_S + beside.scaled(BOUND_S)
    started[victim].send_signal(signal.SIGCONT)
    woken = time.monotonic()
    _, errors = started[victim].communicate(timeout=30)
    assert time.monotonic() - woken < beside.scaled(WAKES_S)
    assert started[victim].returncode == -signal.SIGKILL, errors
    assert "this process has stood still, and counts as lost since" in errors
    assert "Traceback" not in errors and not (launcher.folder / f"end.{victim}").exists()


def test_it_ends_itself_while_the_others_train(launcher):
    """They have not ended: its last word is what they have told it."""
    env = {"STOPS": "1", "SILENT": str(SILENT_S), "SLOW": "1.5"}
    started = launcher.start_ranks(3, PROGRAM, "before", "1", env=env)
    eventually(lambda: time.time() - began(launcher) > SILENT_S + 2)
    started[1].send_signal(signal.SIGCONT)
    errors = started[1].communicate(timeout=30)[1]
    assert started[1].returncode == -signal.SIGKILL, errors
    outputs = [started[rank].communicate(timeout=90)[1] for rank in (0, 2)]
    assert [started[rank].returncode for rank in (0, 2)] == [0, 0], outputs
    require_undisturbed(found(launcher, (0, 2)), 2)


@pytest.mark.parametrize(("where", "place"), [("python", "forward"), ("operator", "before")])
def test_one_that_is_busy_for_longer_is_not_lost(where, place, launcher):
    env = {"SILENT": "1", "BUSY": "3", "BUSY_IN": where}
    started = launcher.start_ranks(3, PROGRAM, place, "1", env=env)
    outputs = [rank.communicate(timeout=90)[1] for rank in started]
    assert [rank.returncode for rank in started] == [0, 0, 0], outputs
    require_undisturbed(found(launcher, range(3)), 3)


def test_the_launcher_kills_it_once_the_others_go_on(launcher):
    words = ("run", *PRELOAD, "-n", 3, "--elastic", 2, PROGRAM, "before", "1")
    run = launcher.run(*words, env={"STOPS": "1", "SILENT": str(SILENT_S)})
    assert run.returncode == 0, run.stderr
    lines = run.stderr.splitlines()
    killed = lines.index("lamina run: rank 1 gave no sign of life, and the others go on without it: killed")
    lost = lines.index("lamina run: rank 1 is lost: killed by signal 9 (SIGKILL); 2 others go on")
    assert killed < lost
    assert [line for line in lines if line.startswith("lamina: lost rank 1 (machine ")], lines
    require_undisturbed(found(launcher, (0, 2)), 2)


@pytest.mark.parametrize("newcomer", some(["freezes entering", "freezes working", ""], 2, seed=1))
def test_it_is_started_again_and_joins_the_others(newcomer, launcher):
    """The newcomer may stand still as well."""
    program = PROGRAM.with_name("joining.py")
    words = ("run", *PRELOAD, "-n", 3, "--elastic", "2:3", program, "before:1:3")
    env = {"STOPS": "1", "SILENT": str(SILENT_S), "NEWCOMER": newcomer, "SLOW_S": "0.7"}
    run = launcher.run(*words, env=env)
    assert run.returncode == 0, run.stderr
    given_up = "rank 1 is not started again: it has ended in the same way twice" in run.stderr  # within 10 s each time
    assert not (given_up and newcomer == "")
    assert bool(newcomer) == (launcher.folder / "faltered.1").exists(), run.stderr
    assert run.stderr.count("rank 1 gave no sign of life") == (2 if newcomer else 1), run.stderr
    ends = found(launcher, (0, 2) if given_up else range(3))
    require_joined(ends, len(ends))
    assert given_up or ends[1]["is_new"]
